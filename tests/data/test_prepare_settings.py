"""Settings of the prepare stage that change which rows there are, their prompts or what is supervised."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from eagle_train.data.prepare import prepare
from eagle_train.data.rows import open_rows
from eagle_train.data.templates import parse_arguments
from eagle_train.data.tokenizer import load_tokenizer
from eagle_train.errors import UserError

from .small import make, talk, target_with, write


def answers(rows: Path, target: Path) -> list[list[str]]:
    """Return the supervised texts of every row."""
    tokenizer = load_tokenizer(str(target))
    return [
        [tokenizer.decode(row["input_ids"][first : last + 1]) for first, last in row["spans"]]
        for row in open_rows(rows).dataset
    ]


def test_only_the_last_answer_is_supervised_on_request(tmp_path: Path, target: Path, byte_level: Any) -> None:
    data = write(tmp_path / "a.jsonl", [talk("Hi", "Hello", "How?", "Fine"), talk("Hi", "Hello there")])
    make(data, target, tmp_path / "all")
    summary = make(data, target, tmp_path / "last", last_turn_only=True)
    assert answers(tmp_path / "all", target) == [
        ["Hello<|im_end|>", "Fine<|im_end|>"],
        ["Hello there<|im_end|>"],
    ]
    assert answers(tmp_path / "last", target) == [["Fine<|im_end|>"], ["Hello there<|im_end|>"]]
    whole, last = (open_rows(tmp_path / name).dataset[0] for name in ("all", "last"))
    assert last["input_ids"] == whole["input_ids"]
    first, end = last["spans"][0]
    assert [last["loss_mask"][place] for place in (first - 1, first, end, end + 1)] == [0, 1, 1, 0]
    assert sum(last["loss_mask"]) == end + 1 - first
    assert summary["last_turn_only"] is True
    with pytest.raises(UserError, match="last_turn_only True there, False now"):
        make(data, target, tmp_path / "last")
    with pytest.raises(UserError, match="no row is left of 2"):
        make(data, target, tmp_path / "cut", last_turn_only=True, max_length=first - 20)
    # A template that rewrites history gives one row an answer: the last row is left.
    thinking = target_with(tmp_path / "thinking", byte_level("qwen-thinking"))
    make(data, thinking, tmp_path / "rewritten", last_turn_only=True)
    assert answers(tmp_path / "rewritten", tmp_path / "thinking") == answers(tmp_path / "last", target)
    tokens = {"input_ids": [5, 6, 7, 8, 9], "loss_mask": [0, 1, 0, 1, 1]}
    make(write(tmp_path / "t.jsonl", [tokens]), target, tmp_path / "tokens", last_turn_only=True)
    assert open_rows(tmp_path / "tokens").dataset[0]["loss_mask"] == [0, 0, 0, 1, 1]


def test_duplicates_are_dropped_on_request(tmp_path: Path, target: Path) -> None:
    records = [talk("Hi", "Hello"), talk("Hi", "Bye"), talk("Hi", "Hello", id="again"), talk("Hi", "Hello")]
    data = write(tmp_path / "a.jsonl", records)
    kept = make(data, target, tmp_path / "kept")
    assert (kept["rows"], kept["counts"]["kept"], kept["counts"]["copies"]) == (4, 4, 2)
    made = make(data, target, tmp_path / "dropped", drop_duplicates=True)
    assert (made["rows"], made["counts"]["kept"], made["counts"]["copies_dropped"]) == (2, 2, 2)
    assert made["drop_duplicates"] is True
    assert answers(tmp_path / "dropped", target) == [["Hello<|im_end|>"], ["Bye<|im_end|>"]]
    assert made["supervised_tokens"] == sum(made["supervised_frequencies"].values())
    with pytest.raises(UserError, match=r"a.jsonl: a weight of 2 repeats records, and --drop-duplicates"):
        prepare([f"{data}=2"], str(target), tmp_path / "x", drop_duplicates=True, show=False)


def test_a_mixture_by_weights(tmp_path: Path, target: Path) -> None:
    one = write(tmp_path / "one.jsonl", [talk(f"Question {n}", "One") for n in range(40)])
    two = write(tmp_path / "two.jsonl", [talk(f"Question {n}", "Two") for n in range(5)])
    mixture = [f"{one}=0.25", f"{two}=2"]

    def prepared(name: str, data: list[str]) -> dict[str, Any]:
        return prepare(data, str(target), tmp_path / name, show=False, num_proc=1)

    summary = prepared("rows", mixture)
    found = [texts[0] for texts in answers(tmp_path / "rows", target)]
    assert 8 <= found.count("One<|im_end|>") <= 12
    assert found.count("Two<|im_end|>") == 10
    assert summary["counts"]["left_out"] == 40 - found.count("One<|im_end|>")
    assert summary["counts"]["repeated"] == 5
    assert [source.get("weight") for source in summary["inputs"]] == [0.25, 2.0]
    assert prepared("again", mixture)["rows_digest"] == summary["rows_digest"]
    with pytest.raises(UserError, match="the input files differ"):
        prepared("rows", [str(one), f"{two}=2"])


def test_template_arguments_change_the_prompt_and_are_recorded(tmp_path: Path, byte_level: Any) -> None:
    tokenizer = byte_level("chatml")
    tokenizer.chat_template += (
        "{% if add_generation_prompt and enable_thinking is defined and enable_thinking is false %}"
        "{{ '<think>\n\n</think>\n\n' }}{% endif %}"
    )
    target = tmp_path / "target"
    target_with(target, tokenizer)
    data = write(tmp_path / "a.jsonl", [talk("Hi", "Hello")])
    plain = make(data, target, tmp_path / "plain")
    made = make(data, target, tmp_path / "rows", template_arguments={"enable_thinking": False})
    assert answers(tmp_path / "rows", target) == answers(tmp_path / "plain", target) == [["Hello<|im_end|>"]]
    row = open_rows(tmp_path / "rows").dataset[0]
    prompt = tokenizer.decode(row["input_ids"][: row["spans"][0][0]])
    assert prompt.endswith("<|im_start|>assistant\n<think>\n\n</think>\n\n")
    assert made["template_arguments"] == {"enable_thinking": False}
    assert plain["template_arguments"] == {}
    with pytest.raises(UserError, match="template_arguments"):
        make(data, target, tmp_path / "rows")


def test_rows_of_before_these_settings_are_the_same_rows(tmp_path: Path, target: Path) -> None:
    data = write(tmp_path / "a.jsonl", [talk("Hi", "Hello")])
    make(data, target, tmp_path / "rows")
    file = tmp_path / "rows" / "rows.json"
    info = json.loads(file.read_text())
    for name in ("template_arguments", "last_turn_only", "drop_duplicates"):
        del info[name]
    file.write_text(json.dumps(info))
    assert make(data, target, tmp_path / "rows")["reused"]
    with pytest.raises(UserError, match="drop_duplicates False there, True now"):
        make(data, target, tmp_path / "rows", drop_duplicates=True)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("enable_thinking", "wanted NAME=VALUE"),
        ("=1", "wanted NAME=VALUE"),
        ("a b=1", "wanted NAME=VALUE"),
        ("messages=[]", "messages is given by eagle itself"),
    ],
)
def test_template_arguments_that_are_none(text: str, told: str) -> None:
    with pytest.raises(UserError, match=told):
        parse_arguments([text])


def test_values_of_template_arguments() -> None:
    given = ["a=false", "b=3", "c=low", 'd={"e": 1}', "f=", "g=x=y"]
    assert parse_arguments(given) == {"a": False, "b": 3, "c": "low", "d": {"e": 1}, "f": "", "g": "x=y"}
