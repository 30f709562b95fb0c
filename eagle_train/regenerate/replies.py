"""What a server's replies say. Whatever a reply may hold, it is read, or it is `Malformed`."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, TypeVar

from eagle_train.data.token_rows import are_ids
from eagle_train.regenerate.answers import Answer

_FINISHED = {"stop": True, "tool_calls": True, "function_call": True, "length": False}
_ODD = (KeyError, IndexError, TypeError, AttributeError, ValueError, OverflowError, RecursionError)

Found = TypeVar("Found")


class Malformed(Exception):
    """A reply that is none; another try may bring a better one. The text is one short line."""


class Refused(Exception):
    """A request that came to nothing, whatever was tried; the text says why."""


def read_reply(content: bytes, read: Callable[[Any], Found]) -> Found:
    """Return what `read` finds in the JSON `content`. Raises Malformed when anything about it is odd."""
    try:
        return read(json.loads(content))
    except RecursionError as error:
        raise Malformed("the reply is nested too deeply") from error
    except _ODD as error:
        raise Malformed(f"an odd reply ({type(error).__name__}: {short(str(error))})") from error


def answer_in(reply: Any) -> Answer:
    """Return the answer in a completion, with the ids that came with it, none where those make no sense.

    For `read_reply`. Raises Refused where there never will be one.
    """
    choice = reply["choices"][0]
    message, reason = choice["message"], choice["finish_reason"]
    if reason == "content_filter":
        raise Refused("withheld by the server's content filter")
    if not isinstance(reason, str) or reason not in _FINISHED:
        raise ValueError(f"finish_reason {reason!r}")
    ids = choice.get("token_ids")
    reasoning = message.get("reasoning_content") or message.get("reasoning")
    return Answer.checked(
        _text(message.get("content")),
        _FINISHED[reason],
        ids if ids is None or are_ids(ids) else [],
        _text(reasoning) if reasoning else None,
        _plain(message.get("tool_calls")) or None,
    )


def models_in(reply: Any) -> list[str]:
    """Return the names of the models that a server lists. For `read_reply`."""
    names = [model["id"] for model in reply["data"]]
    if not all(isinstance(name, str) for name in names):
        raise ValueError("the id of a model is no text")
    return names


def text_of(content: bytes) -> str:
    """Return a reply as a person reads it, whatever it claims to be encoded in."""
    return content.decode("utf-8", "replace")


def short(text: str) -> str:
    """Return `text` in one line of at most 200 letters."""
    return " ".join(text[:2000].split())[:200]


def _text(text: Any) -> str:
    if text is None:
        return ""
    if not isinstance(text, str):
        raise ValueError(f"the answer is a {type(text).__name__}, wanted text")
    return text.encode("utf-8", "replace").decode("utf-8")


def _plain(calls: Any) -> Any:
    """Return `calls` as they can be written and sent again: valid Unicode, finite numbers."""
    return json.loads(_text(json.dumps(calls, ensure_ascii=False, allow_nan=False)))
