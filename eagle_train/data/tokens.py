"""Tokens of texts that follow one another: what is generated begins where the prompt's tokens end."""

from __future__ import annotations

import re
from functools import lru_cache
from typing import Any


class Tokens:
    """One tokenizer. `added` matches its added tokens, longest first; `ids_of_added` gives their ids.

    `by_parts` is True where tokens begin alike at a text's start and behind an added token.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._backend = getattr(tokenizer, "backend_tokenizer", None)
        if self._backend is not None:  # some tokenizer files ask for cutting and padding by themselves
            self._backend.no_truncation()
            self._backend.no_padding()
        self.ids_of_added = {str(token): number for number, token in tokenizer.added_tokens_decoder.items()}
        longest_first = sorted(filter(None, self.ids_of_added), key=len, reverse=True)
        self.added = re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")
        self._swallowing = {str(token) for token in tokenizer.added_tokens_decoder.values() if token.rstrip}
        self._short_ids = lru_cache(4096)(self.ids)
        self._part_ids = lru_cache(1024)(self.ids)
        splits_cleanly = self._backend is not None and not any(
            token.lstrip
            or token.rstrip
            or token.single_word
            or (token.normalized and self._backend.normalizer)
            for token in tokenizer.added_tokens_decoder.values()
        )
        self._starts_clean = self._short_ids("x") == self._behind("\n", "x")
        self.by_parts = splits_cleanly and self._starts_clean

    def ids(self, text: str) -> list[int]:
        """Return the tokens of `text` alone, with no special tokens around it."""
        if self._backend is not None:
            return self._backend.encode_batch_fast([text], add_special_tokens=False)[0].ids
        return self._tokenizer.encode(text, add_special_tokens=False)

    def ids_of_history(self, text: str) -> list[int]:
        """Return the tokens of `text`, whose parts between added tokens were seen before.

        A rewriting template repeats the history in the prompt of every answer: this keeps the work
        linear. Equal to `ids`.
        """
        if not self.by_parts:
            return self.ids(text)
        ids, done = [], 0
        for match in self.added.finditer(text):
            if match.start() > done:
                ids += self._part_ids(text[done : match.start()])
            ids.append(self.ids_of_added[match.group()])
            done = match.end()
        return ids + self._part_ids(text[done:]) if done < len(text) else ids

    def _behind(self, context: str, text: str) -> list[int] | None:
        """Return the tokens of `text` behind `context`, None where a token would reach over the border."""
        head = self._short_ids(context) if len(context) < 200 else self.ids(context)
        both = self.ids(context + text)
        return both[len(head) :] if both[: len(head)] == head else None

    def ids_after(self, context: str, text: str, generated: bool = False) -> list[int]:
        """Return the tokens `text` gets once `context` is already tokenised.

        Tokenisers split at added tokens first, so only the text since the last of them matters. Where
        a token would reach over the border, `text` is tokenised alone; tokenisers that begin a text
        with a mark of their own are kept from it by a line break in front. Some added tokens swallow the
        white space behind them when a text is read, but not when a model generates it.
        """
        near = context[self._last_added(context) :]
        swallowed = generated and text[:1].isspace() and near.rstrip() in self._swallowing
        found = None if swallowed else self._behind(near, text)
        if found is None and not self._starts_clean:
            found = self._behind("\n", text)
        return self.ids(text) if found is None else found

    def _last_added(self, text: str) -> int:
        window = 256
        while True:
            start = max(0, len(text) - window)
            places = [match.start() for match in self.added.finditer(text, start)]
            if places or not start:
                return places[-1] if places else 0
            window *= 8
