"""Five records, the files that hold them, and what is read from such files."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

from eagle_train.data.reading import Tally, read_sources
from eagle_train.data.records import Conversation
from eagle_train.data.sources import find_sources


def record(number: int, text: str = "Hello", **fields: Any) -> dict[str, Any]:
    turns = [{"from": "human", "value": f"Question {number}"}, {"from": "gpt", "value": text}]
    return {"id": number, "conversations": turns, **fields}


def read(*names: str) -> list[Conversation]:
    found = list(read_sources(find_sources(list(names)), Tally()))
    assert all(isinstance(item, Conversation) for item in found)
    return found  # type: ignore[return-value]


def questions(data: list[Path]) -> list[str]:
    return [conversation.turns[0].content for conversation in read(*map(str, data))]


WANTED = [f"Question {number}" for number in range(5)]
RECORDS = [record(number) for number in range(5)]


def lines(records: list[Any] = RECORDS) -> str:
    return "".join(json.dumps(item) + "\n" for item in records)


def write(path: Path, content: str | bytes) -> Path:
    raw = content if isinstance(content, bytes) else content.encode("utf-8")
    path.write_bytes(gzip.compress(raw) if path.name.lower().endswith(".gz") else raw)
    return path
