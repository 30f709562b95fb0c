"""What is dropped, cut and joined until a prompt comes first and an answer, or a prompt to answer, last."""

from __future__ import annotations

from typing import Any

import pytest

from eagle_train.data.conversations import read_prompts
from eagle_train.data.records import Skip

from .spoken import A, Q, read, shape


@pytest.mark.parametrize(
    ("turns", "left", "repair"),
    [
        ([A, Q, A], [Q, A], "answer before the first prompt dropped"),
        ([A, A, Q, A], [Q, A], "answer before the first prompt dropped"),
        ([Q, A, Q], [Q, A], "turn without an answer dropped"),
        ([Q, A, {"from": "human", "value": ""}, A], [Q, A], "cut before an empty turn"),
        ([Q, A, Q, {"from": "gpt", "value": None}, Q, A], [Q, A], "cut before an empty turn"),
        ([Q, A, Q, {"from": "gpt", "value": " \n"}], [Q, A], "cut before an empty turn"),
        ([{"from": "system", "value": ""}, Q, A], [Q, A], "empty system turn dropped"),
        ([Q, Q, A], [{"from": "human", "value": "Hi\n\nHi"}, A], "user turns in a row joined"),
        ([Q, A, A], [Q, {"from": "gpt", "value": "Hello\n\nHello"}], "assistant turns in a row joined"),
        (
            [{"from": "human", "value": [{"type": "text", "text": "Hi"}, "you"]}, A],
            [{"from": "human", "value": "Hi\nyou"}, A],
            "text parts joined",
        ),
    ],
)
def test_repairs(turns: list[Any], left: list[Any], repair: str) -> None:
    found = read({"conversations": turns})
    assert shape(found) == shape(read({"conversations": left}))
    assert repair in found.repairs


TOOL = {"role": "tool", "content": "42"}
NOTHING = {"from": "gpt", "value": ""}


@pytest.mark.parametrize(
    ("record", "asked", "repairs"),
    [
        ({"messages": [Q, A, Q]}, ["Hi", "Hi"], ()),
        ({"messages": [Q]}, ["Hi"], ()),
        ({"messages": [Q, NOTHING, Q, NOTHING]}, ["Hi", "Hi"], ()),
        ({"turns": ["Hi", "And you?"]}, ["Hi", "And you?"], ()),
        ({"messages": [Q, Q, A]}, ["Hi\n\nHi"], ("user turns in a row joined",)),
        ({"messages": [A, Q]}, ["Hi"], ("answer before the first prompt dropped",)),
        ({"messages": [Q, A, TOOL, A, Q]}, ["Hi"], ("cut before a tool turn",)),
        ({"messages": [Q, A, {"from": "human", "value": " "}, A]}, ["Hi"], ("cut before an empty turn",)),
    ],
)
def test_prompts_alone(record: Any, asked: list[str], repairs: tuple[str, ...]) -> None:
    found = read_prompts({"system": "Be kind.", "id": 7, **record}, "file#1")
    assert shape(found) == [("system", "Be kind."), *(("user", text) for text in asked)]
    assert (found.repairs, found.record_id, found.source) == (repairs, 7, "file#1:7")


@pytest.mark.parametrize(
    ("record", "reason"),
    [
        ({"messages": []}, "empty conversation"),
        ({"messages": [A]}, "no prompt"),
        ({"system": "Be kind.", "messages": [{"role": "system", "content": "x"}]}, "system turn only"),
        ({"messages": [{"from": "human", "value": ""}, A]}, "an empty turn before the first answer"),
        ({"input_ids": [5, 6], "loss_mask": [0, 1]}, "tokens instead of a conversation"),
        ({"turns": [3]}, "no conversation in the record"),
    ],
)
def test_records_without_a_prompt(record: Any, reason: str) -> None:
    with pytest.raises(Skip, match=reason):
        read_prompts(record, "file#1")
