"""Each repair and each reason to skip: one rule, one count."""

from __future__ import annotations

from typing import Any

import pytest

from eagle_train.data.conversations import read_prompts, read_record
from eagle_train.data.records import BadRecord, Conversation, Skip, Skipped, TokenRow
from eagle_train.data.token_rows import spans_of

Q, A = {"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello"}


def read(record: Any) -> Conversation:
    found = read_record(record, "file#1")
    assert isinstance(found, Conversation)
    return found


def shape(found: Conversation) -> list[tuple[str, str]]:
    return [(turn.role, turn.content) for turn in found.turns]


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


def test_damaged_text_is_no_reason_to_skip_but_a_bad_record() -> None:
    for damaged in ({"messages": [Q, {"role": "assistant", "content": "a\ud800b"}]},):
        with pytest.raises(BadRecord, match="not valid Unicode"):
            read_record(damaged, "file#1")
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


def test_token_rows_are_taken_as_they_are() -> None:
    found = read_record({"input_ids": [5, 6, 7, 8, 9], "loss_mask": [0, 1, 1, 0, 1]}, "file#1")
    assert isinstance(found, TokenRow)
    assert found.input_ids == (5, 6, 7, 8, 9)
    assert found.spans == ((1, 2), (4, 4))
    two = read_record(
        {
            "input_ids": [5, 6, 7, 8],
            "loss_mask": [0, 1, 1, 1],
            "spans": [[1, 1], [2, 3]],
            "conversation_id": 4,
        },
        "file#1",
    )
    assert isinstance(two, TokenRow)
    assert (two.spans, two.conversation_id) == (((1, 1), (2, 3)), "4")


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"loss_mask": [0, 0, 0]}, "supervises nothing"),
        ({"loss_mask": [1, 1, 1]}, "supervises the first token"),
        ({"loss_mask": [0, 1]}, "one per token"),
        ({"loss_mask": [0, 2, 0]}, "one per token"),
        ({}, "one per token"),
        ({"loss_mask": [0, 1, 1], "spans": [[1, 1]]}, "disagree"),
        ({"loss_mask": [0, 1, 1], "spans": [[2, 1]]}, "not in order"),
        ({"loss_mask": [0, 1, 1], "spans": [[1, 2], [1, 2]]}, "not in order"),
        ({"loss_mask": [0, 1, 1], "spans": [[2, 2], [1, 1]]}, "not in order"),
        ({"loss_mask": [0, 1, 1], "spans": [[1, 10**12]]}, "outside the row"),
        ({"loss_mask": [0, 1, 1], "spans": [[-2, 2]]}, "not in order"),
        *(
            ({"loss_mask": [0, 1, 1], "spans": spans}, "not pairs")
            for spans in (7, "1,2", {"a": 1}, [7], [None], [[1]], [[1, 2, 2]], [["1", "2"]], [[True, 2]])
        ),
        ({"input_ids": [], "loss_mask": []}, "input_ids is not"),
        ({"input_ids": [1, "a", 2], "loss_mask": [0, 1, 1]}, "input_ids is not"),
        ({"input_ids": [1, -2, 2], "loss_mask": [0, 1, 1]}, "input_ids is not"),
        ({"input_ids": [1, 2**31, 2], "loss_mask": [0, 1, 1]}, "input_ids is not"),
    ],
)
def test_token_rows_that_train_on_nothing_or_everything_are_refused(fields: Any, reason: str) -> None:
    with pytest.raises(Skip, match=reason):
        read_record({"input_ids": [5, 6, 7], **fields}, "file#1")


def test_spans_of() -> None:
    assert spans_of([]) == []
    assert spans_of([0, 1, 1, 0, 1]) == [(1, 2), (4, 4)]


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


def test_reasons_are_few_and_keep_a_few_examples() -> None:
    skipped = Skipped()
    for number in range(1000):
        with pytest.raises(Skip) as caught:
            read({"messages": [{"role": f"alien {number} " + "x" * 500, "content": "Hi"}, A]})
        skipped.add(caught.value.kind, f"file#{number}", caught.value.detail)
    assert skipped.by_count() == {"unknown role": 1000}
    (named,) = skipped.examples.values()
    assert [text.split(":")[0] for text in named] == ["file#0", "file#1", "file#2"]
    assert max(map(len, named)) <= 120
    both = skipped + skipped
    assert both.by_count() == {"unknown role": 2000}
    assert both.examples == skipped.examples


@pytest.mark.parametrize(
    ("given", "kept"),
    [
        *[("sea", "sea"), (3, "3"), ("\ud800?", "??"), ("Meer und M\u00f6we", "Meer und M\u00f6we")],
        *[(none, "") for none in (None, KeyError, True, 0.5, {"a": 1}, ["a"], " \n\x1b")],
        (" a\nb\x1b[31m\t\u2028 c\x00", "a b [31m c"),
        ("x" * 80, "x" * 80),
        ("x" * 81, "x" * 79 + "\u2026"),
    ],
)
def test_a_category_is_kept_as_a_short_line_and_makes_no_record_bad(given: Any, kept: str) -> None:
    named = {} if given is KeyError else {"category": given}
    turns = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]
    token_row = {"input_ids": [5, 6], "loss_mask": [0, 1]}
    for record in ({"messages": turns}, token_row):
        assert read_record({**record, **named}, "file#1").category == kept
    assert read_prompts({"turns": ["Hi"], **named}, "file#1").category == kept
