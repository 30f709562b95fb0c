"""Whether token ids that came with an answer are tokens of its text."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import product
from typing import Any

from eagle_train.data.records import Message

_PADDING = 1024  # rows that embeddings have beyond the tokenizer, at most; such ids decode to nothing


def say(
    tokenizer: Any,
    ids: Sequence[int],
    finished: bool,
    content: str,
    reasoning: str | None = None,
    tool_calls: Sequence[Message] = (),
) -> bool:
    """True when `ids`, decoded, are the answer; those of a `finished` one end with its end-of-turn token.

    White space at the ends counts for nothing, and special tokens may be shown or not. Where a thought or
    calls were parsed out of the text, all parts must be there in this order, and nothing behind the content
    of an answer without calls.
    """
    if not ids or max(ids) >= len(tokenizer) + _PADDING:
        return False
    names = [str(call["function"]["name"]) for call in tool_calls]
    wanted = [part for part in map(_bare, (reasoning or "", content, *names)) if part]
    if reasoning is None and not names:
        return any(text == _bare(content) for text in _decoded(tokenizer, ids, finished))
    return any(
        _holds(text, wanted) and (bool(names) or text.endswith(_bare(content)))
        for text in _decoded(tokenizer, ids, finished)
    )


def _decoded(tokenizer: Any, ids: Sequence[int], finished: bool) -> Iterator[str]:
    """Yield the texts that an engine may make of `ids`, the most likely first."""
    readings = (ids[:-1], ids) if finished else (ids,)
    for shown, skips, cleans in product(readings, (False, True), (False, True)):
        text = tokenizer.decode(list(shown), skip_special_tokens=skips, clean_up_tokenization_spaces=cleans)
        yield _bare(str(text))


def _bare(text: str) -> str:
    """Return `text` without white space at its ends and without the half of a letter it was cut in."""
    return text.strip().rstrip("\ufffd").rstrip()


def _holds(text: str, parts: Sequence[str]) -> bool:
    place = 0
    for part in parts:
        found = text.find(part, place)
        if found < 0:
            return False
        place = found + len(part)
    return True
