"""Answers made by a server, and what they must be."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from eagle_train.regenerate.answers import AnswerSettings
from eagle_train.regenerate.regenerate import regenerate
from eagle_train.regenerate.server import Server

from .asking import asked_again
from .chat_server import reply, token_ids

Start = Callable[..., tuple[str, Path]]
HOW = ("--max-new-tokens", "50", "--in-flight", "4")
NO_MODEL = "./served-elsewhere"  # there is no tokenizer of that name


def make(data: Path, target: Path | str, out: Path, server: Server, **options: Any) -> dict[str, Any]:
    settings = options.pop("settings", AnswerSettings(max_new_tokens=50))
    return regenerate([str(data)], str(target), out, settings=settings, server=server, show=False, **options)


def expected(records: list[dict[str, Any]], target: Path | None = None) -> list[dict[str, Any]]:
    """What the server says, turn by turn on the new history, in the order of the input."""
    tokenizer = Tokenizer.from_file(str(target / "tokenizer.json")) if target else None

    def answer(messages: list[dict[str, Any]]) -> dict[str, Any]:
        text, finished = reply(messages)
        with_ids = {"answer_ids": token_ids(text, finished, tokenizer)} if tokenizer else {}
        return {"role": "assistant", "content": text, **with_ids, "finished": finished}

    return [{"id": one["id"], "messages": asked_again(one["messages"], answer)} for one in records]
