"""Turns as files have them: names of roles, forms of a record, system texts, tools."""

from __future__ import annotations

from typing import Any

import pytest

from eagle_train.data.conversations import read_record
from eagle_train.data.records import Skip

from .spoken import A, Q, read, shape


@pytest.mark.parametrize("name", ["human", "user", "Human", " USER "])
@pytest.mark.parametrize("other", ["gpt", "chatgpt", "bing", "bard", "assistant", "model"])
def test_role_names_in_the_wild(name: str, other: str) -> None:
    found = read({"conversations": [{"from": name, "value": "Hi"}, {"from": other, "value": "Hello"}]})
    assert shape(found) == [("user", "Hi"), ("assistant", "Hello")]
    assert found.repairs == ()


@pytest.mark.parametrize("name", ["tool", "function", "observation"])
def test_tool_turns_are_one_role(name: str) -> None:
    found = read({"messages": [Q, A, {"role": name, "content": "42"}, A]})
    assert [turn.role for turn in found.turns] == ["user", "assistant", "tool", "assistant"]
    assert found.repairs == (() if name == "tool" else (f"role {name} read as tool",))


@pytest.mark.parametrize(
    "record",
    [
        {"conversations": [Q, A]},
        {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]},
        {"messages": [Q, {"role": "assistant", "content": "Hello"}]},
        {"messages": [{"from": "human", "content": "Hi"}, {"role": "assistant", "value": "Hello"}]},
        {"conversation": [Q, A]},
        {"conversations": None, "messages": [Q, A]},
        {"conversations": '[{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello"}]'},
        [Q, A],
    ],
)
def test_forms_of_a_record(record: Any) -> None:
    assert shape(read(record)) == [("user", "Hi"), ("assistant", "Hello")]


def test_system_texts() -> None:
    system = {"role": "system", "content": "Be kind."}
    wanted = [("system", "Be kind."), ("user", "Hi"), ("assistant", "Hello")]
    assert shape(read({"messages": [system, Q, A]})) == wanted
    assert shape(read({"system": "Be kind.", "messages": [Q, A]})) == wanted
    assert shape(read({"system": "Be kind.", "messages": [system, Q, A]})) == wanted
    assert shape(read({"system": "", "messages": [Q, A]})) == wanted[1:]
    two = read({"system": "Be brief.", "messages": [system, Q, A]})
    assert shape(two)[0] == ("system", "Be brief.\n\nBe kind.")
    assert two.repairs == ("system turns in a row joined",)


CALL = {"type": "function", "function": {"name": "weather", "arguments": {"city": "Paris"}}}


@pytest.mark.parametrize(
    "written",
    [
        [CALL],
        [{"name": "weather", "arguments": {"city": "Paris"}}],
        [{"function": {"name": "weather", "arguments": '{"city": "Paris"}'}}],
        '[{"name": "weather", "arguments": "{\\"city\\": \\"Paris\\"}"}]',
    ],
)
def test_tool_calls_have_one_form_and_are_no_empty_turn(written: Any) -> None:
    calling = {"role": "assistant", "content": None, "tool_calls": written}
    result = {"role": "tool", "name": "weather", "content": "rain"}
    found = read({"messages": [Q, calling, result, A], "tools": '[{"name": "weather"}]'})
    assert found.repairs == ()
    assert found.messages()[1:3] == [{"role": "assistant", "content": "", "tool_calls": [CALL]}, result]
    assert found.tools == ({"name": "weather"},)
    plain = read({"messages": [Q, A]})
    assert len({found.id, plain.id, read({"messages": [Q, A], "tools": [{"name": "f"}]}).id}) == 3
    for nothing in ([], None, "[]"):
        assert read({"messages": [Q, A], "tools": nothing}).id == plain.id


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"tools": 3}, "tools is not a list of functions"),
        ({"tools": "[3"}, "tools is not a list of functions"),
        ({"tools": ["f"]}, "tools is not a list of functions"),
        ({"messages": [Q, A | {"tool_calls": 3}]}, "tool_calls is not"),
        ({"messages": [Q, A | {"tool_calls": ["f"]}]}, "tool_calls is not"),
        ({"messages": [Q, A | {"tool_calls": [{"function": "f"}]}]}, "tool_calls is not"),
        ({"messages": [Q, A | {"tool_calls": [{"name": "f", "arguments": "{"}]}]}, "tool_calls is not"),
    ],
)
def test_tools_that_are_none_skip_the_record(fields: Any, reason: str) -> None:
    with pytest.raises(Skip, match=reason):
        read_record({"messages": [Q, A], **fields}, "file#1")
