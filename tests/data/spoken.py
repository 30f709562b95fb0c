"""The shortest conversation, and how a record reads."""

from __future__ import annotations

from typing import Any

from eagle_train.data.conversations import read_record
from eagle_train.data.records import Conversation

Q, A = {"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello"}


def read(record: Any) -> Conversation:
    found = read_record(record, "file#1")
    assert isinstance(found, Conversation)
    return found


def shape(found: Conversation) -> list[tuple[str, str]]:
    return [(turn.role, turn.content) for turn in found.turns]
