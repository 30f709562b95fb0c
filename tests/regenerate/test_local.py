"""Answers made in process: the whole call, its failures and settings, and read again by prepare."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from eagle_train.data.prepare import prepare
from eagle_train.data.rows import open_rows
from eagle_train.errors import UserError
from eagle_train.regenerate.answers import AnswerSettings
from eagle_train.regenerate.output import lines_of
from eagle_train.targets.load import Target

from .asking import chats, read, shown, write
from .local import make


def test_answers_equal_plain_decoding_turn_by_turn_in_order(
    tmp_path: Path, target: Target, expected: list[dict[str, Any]]
) -> None:
    data = write(tmp_path / "a.jsonl", chats())
    report = make(data, target, tmp_path / "out.jsonl")
    assert shown(tmp_path / "out.jsonl") == expected
    answers = [m for record in expected for m in record["messages"] if m["role"] == "assistant"]
    assert {answer["finished"] for answer in answers} == {True, False}
    assert max(len(record["messages"]) for record in expected) >= 6
    assert report["conversations"] == len(expected)
    assert report["answers"] == len(answers)
    assert report["unfinished"] == sum(not answer["finished"] for answer in answers)
    assert report["answer_tokens"] == sum(len(answer["answer_ids"]) for answer in answers)
    assert (report["failed"], report["reused"], report["complete"]) == (0, False, True)
    made_by = read(tmp_path / "out.jsonl")[0]["generated_by"]
    assert made_by == report["generated_by"]
    assert made_by["fingerprint"] == target.fingerprint
    assert made_by["dtype"] == "fp32"
    assert (made_by["temperature"], made_by["max_new_tokens"], made_by["thinking"]) == (0.0, 24, "kept")
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "a.jsonl",
        "out.jsonl",
        "out.jsonl.report.json",
    ]


def test_failures_are_listed_bounded_and_tried_again(tmp_path: Path, target: Target) -> None:
    records = chats(5)
    records[2]["messages"] = [{"role": "user", "content": "too long " * 400}]
    records[3]["messages"] = [
        *({"role": "user", "content": "Hi"}, {"role": "assistant", "content": "x"}),
        {"role": "user", "content": "too long " * 400},
    ]
    data = write(tmp_path / "a.jsonl", records)
    with pytest.raises(
        UserError, match=r"1 answer failed, more than --max-failures 0; .*a.jsonl#3:c2, turn 1"
    ):
        make(data, target, tmp_path / "out.jsonl", max_failures=0)
    assert not (tmp_path / "out.jsonl").exists()
    report = make(data, target, tmp_path / "out.jsonl", max_failures=2)
    assert report["failed"] == 2
    assert [(f["source"], f["turn"]) for f in report["failures"]] == [
        ("a.jsonl#3:c2", 1),
        ("a.jsonl#4:c3", 2),
    ]
    assert "tokens, room for 512" in report["failures"][0]["reason"]
    lines = {line["id"]: line for line in read(tmp_path / "out.jsonl")}
    assert "c2" not in lines
    assert [m["role"] for m in lines["c3"]["messages"]] == ["user", "assistant"]
    again = make(data, target, tmp_path / "out.jsonl", max_failures=2)
    assert not again["reused"]
    assert again == report


def test_sampled_answers_depend_on_the_seed_alone(tmp_path: Path, target: Target) -> None:
    data = write(tmp_path / "a.jsonl", chats(8))

    def sampled(name: str, seed: int, num_slots: int) -> list[dict[str, Any]]:
        settings = AnswerSettings(temperature=1.0, top_p=0.9, max_new_tokens=12, seed=seed)
        make(data, target, tmp_path / name, settings=settings, num_slots=num_slots)
        return shown(tmp_path / name)

    assert sampled("one", 0, 1) == sampled("eight", 0, 8) != sampled("other", 1, 8)
    assert read(tmp_path / "one")[0]["generated_by"]["seed"] == 0


def test_prepare_takes_the_answers_by_their_ids(
    tmp_path: Path, target: Target, ending_target_dir: Path
) -> None:
    data = write(tmp_path / "a.jsonl", chats())
    make(data, target, tmp_path / "out.jsonl.gz")
    lines = [
        json.loads(line) for line in gzip.decompress((tmp_path / "out.jsonl.gz").read_bytes()).splitlines()
    ]
    prepare(
        [str(tmp_path / "out.jsonl.gz")], str(ending_target_dir), tmp_path / "rows", show=False, num_proc=1
    )
    rows = open_rows(tmp_path / "rows")
    assert rows.info["counts"]["kept"] == len(lines)
    found = [row["input_ids"][first : last + 1] for row in rows.dataset for first, last in row["spans"]]
    wanted = [m["answer_ids"] for line in lines for m in line["messages"] if m["role"] == "assistant"]
    assert found == wanted
    assert not [kind for kind in rows.info["counts"]["repaired"] if "answer ids" in kind]


def test_thoughts_kept_or_stripped(tmp_path: Path, target: Target) -> None:
    """The template opens a thought; the tiny model never closes it."""
    template = tmp_path / "thinking.jinja"
    template.write_text(
        target.tokenizer.chat_template.replace(
            "<|im_start|>assistant\n' }}", "<|im_start|>assistant\n<think>\n' }}"
        )
    )
    data = write(tmp_path / "a.jsonl", chats(3))
    kept = make(data, target, tmp_path / "kept.jsonl", chat_template=str(template))
    assert kept["answers"] > 0
    settings = AnswerSettings(max_new_tokens=24, keep_thinking=False)
    with pytest.raises(UserError, match=r"stripped.jsonl: not written: all 3 answers are empty; remove"):
        make(data, target, tmp_path / "stripped.jsonl", chat_template=str(template), settings=settings)
    assert not (tmp_path / "stripped.jsonl").exists()


@pytest.mark.parametrize(
    ("records", "told"),
    [
        ([], "no prompt in 0 records"),
        ([{"messages": []}, {"nothing": 1}], "no prompt in 2 records .*empty conversation: 1"),
    ],
)
def test_nothing_to_ask(tmp_path: Path, target: Target, records: list[Any], told: str) -> None:
    with pytest.raises(UserError, match=told):
        make(write(tmp_path / "a.jsonl", records), target, tmp_path / "out.jsonl")
    assert [path.name for path in tmp_path.iterdir()] == ["a.jsonl"]


def test_tools_and_arguments_reach_the_prompt_and_tools_the_output(
    tmp_path: Path, target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    from eagle_train.regenerate import local

    template = tmp_path / "tools.jinja"
    template.write_text("{{ mood }} {{ tools | tojson }} " + str(target.tokenizer.chat_template))
    prompts: list[str] = []
    decode = local.decode

    def watched(target: Target, jobs: Any, *more: Any) -> Any:
        prompts.extend(target.tokenizer.decode(job.prompt) for job in jobs)
        return decode(target, jobs, *more)

    monkeypatch.setattr(local, "decode", watched)
    tools = [{"type": "function", "function": {"name": "weather"}}]
    data = write(tmp_path / "a.jsonl", [{**chats(1)[0], "tools": tools}])
    make(
        data, target, tmp_path / "out.jsonl", chat_template=str(template), template_arguments={"mood": "calm"}
    )
    assert prompts[0].startswith('calm [{"type": "function", "function": {"name": "weather"}}] <|im_start|>')
    (line,) = read(tmp_path / "out.jsonl")
    assert line["tools"] == tools
    assert line["generated_by"]["template_arguments"] == {"mood": "calm"}


def test_what_was_left_out_is_named(tmp_path: Path, target: Target) -> None:
    data = write(tmp_path / "a.jsonl", [*chats(1), {"messages": []}, {"nothing": 1}, *chats(1)])
    data.write_text(data.read_text() + '{"messages": [')
    with pytest.raises(UserError, match=r"a\.jsonl:5 \(record 5\): not valid JSON.*--skip-bad"):
        make(data, target, tmp_path / "out.jsonl")
    report = make(data, target, tmp_path / "out.jsonl", skip_bad=True)
    assert [line["row_id"][-2:] for line in read(tmp_path / "out.jsonl")] == ["-0", "-1"]
    said = list(lines_of(report))
    assert said[0].startswith("2 conversations, 2 answers")
    assert said[1:] == [
        "  skipped        1  empty conversation (first a.jsonl#2)",
        "  skipped        1  no conversation in the record (first a.jsonl#3)",
        f"  damaged        1  records; the first at {data}:5 (record 5)",
    ]


def test_a_conversation_keeps_its_category(tmp_path: Path, target: Target) -> None:
    first, second = chats(2)
    data = write(tmp_path / "a.jsonl", [{**first, "category": "sea"}, second])
    make(data, target, tmp_path / "out.jsonl")
    lines = read(tmp_path / "out.jsonl")
    assert lines[0]["category"] == "sea"
    assert "category" not in lines[1]
