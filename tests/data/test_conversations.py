"""A record becomes a conversation, or is left out for one reason of few, or is damaged."""

from __future__ import annotations

from typing import Any

import pytest

from eagle_train.data.conversations import read_record
from eagle_train.data.records import BadRecord, Skip

from .spoken import A, Q, read, shape


@pytest.mark.parametrize(
    ("record", "reason"),
    [
        ({"conversations": []}, "empty conversation"),
        ({"conversations": None}, "empty conversation"),
        ({"text": "Hi"}, "no conversation in the record"),
        ("Hi", "the record is not an object"),
        (None, "the record is not an object"),
        ({"messages": "Hi"}, "the conversation is not a list of turns"),
        ({"messages": {"role": "user"}}, "the conversation is not a list of turns"),
        ({"messages": ["Hi", "Hello"]}, "a turn is not an object"),
        ({"messages": [{"content": "Hi"}]}, "a turn without a role"),
        ({"messages": [{"role": 3, "content": "Hi"}]}, "a turn without a role"),
        ({"messages": [{"role": "system", "content": "Be kind."}]}, "system turn only"),
        ({"system": "Be kind.", "messages": [{"role": "system", "content": " "}]}, "system turn only"),
        ({"messages": [Q]}, "no answer"),
        ({"messages": [A]}, "no prompt before the answer"),
        ({"messages": [Q, {"role": "function_call", "content": "{}"}, A]}, "unknown role: 'function_call'"),
        ({"messages": [{"role": "user", "content": 3}, A]}, "the text of a turn is not a string"),
        ({"messages": [{"role": "user", "content": {"a": 1}}, A]}, "the text of a turn is not a string"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}, A]},
            "a part of a turn is not text",
        ),
        ({"messages": [{"role": "user", "content": ""}, A]}, "an empty turn before the first answer"),
        ({"messages": [Q, {"role": "assistant", "content": None}]}, "an empty turn before the first answer"),
        ({"system": 3, "messages": [Q, A]}, "the system text is not a string"),
        ({"messages": [Q, A | {"answer_ids": ["a"]}]}, "answer_ids is not a list of token ids"),
        ({"messages": [Q, A | {"answer_ids": [True]}]}, "answer_ids is not a list of token ids"),
    ],
)
def test_reasons_to_skip(record: Any, reason: str) -> None:
    with pytest.raises(Skip) as caught:
        read_record(record, "file#1")
    assert str(caught.value) == reason


def test_damaged_text_is_no_reason_to_skip_but_a_bad_record() -> None:
    with pytest.raises(BadRecord, match="not valid Unicode"):
        read_record({"messages": [Q, {"role": "assistant", "content": "a\ud800b"}]}, "file#1")
    with pytest.raises(BadRecord):
        read_record({"system": "\udfff", "messages": [Q, A]}, "file#1")
    with pytest.raises(BadRecord, match="character 1 of a role"):
        read({"messages": [{"role": "u\ud800", "content": "Hi"}, A]})
    with pytest.raises(BadRecord, match="of a tool call"):
        read({"messages": [Q, A | {"tool_calls": [{"name": "f", "arguments": {"a": "\ud800"}}]}]})
    with pytest.raises(BadRecord, match="of conversation_id"):
        read_record({"input_ids": [5, 6], "loss_mask": [0, 1], "conversation_id": "\ud800"}, "file#1")


def test_fields_nobody_uses_may_be_anything() -> None:
    for other in (3, "a", None, [1], {"b": "\ud800"}, 1.5, True):
        found = read({"id": other, "model": other, "conversations": [Q | {"weight": other}, A]})
        assert shape(found) == [("user", "Hi"), ("assistant", "Hello")]
    assert read({"id": 7, "conversations": [Q, A]}).source == "file#1:7"
    assert read({"id": "\ud800", "conversations": [Q, A]}).source == "file#1:?"


def test_conversation_id_follows_the_text_alone() -> None:
    one = read({"id": "a", "conversations": [Q, A]})
    copy = read({"id": "b", "messages": [{"role": "user", "content": "Hi"}, A]})
    other = read({"id": "a", "conversations": [Q, A, Q, A]})
    assert one.id == copy.id != other.id
    assert len(one.id) == 16


def test_answers_record() -> None:
    answer = {"role": "assistant", "content": "Hello", "answer_ids": [5, 6], "finished": False}
    made_by = {"model": "m", "tokenizer_fingerprint": "abc", "dtype": "fp32"}
    found = read({"generated_by": made_by, "messages": [Q, answer]})
    assert found.tokenizer_fingerprint == "abc"
    assert found.turns[1].answer_ids == (5, 6)
    assert not found.turns[1].finished
    joined = read({"generated_by": made_by, "messages": [Q, answer, answer]})
    assert joined.turns[1].answer_ids is None
