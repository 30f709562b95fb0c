"""The folder that only grows: cut lines, damage, other settings, two runs at once."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from eagle_train.errors import UserError
from eagle_train.io.text import write_json
from eagle_train.regenerate.answers import Answer
from eagle_train.regenerate.output import finished_report, report_of
from eagle_train.regenerate.work import folder_of, open_work

IDENTITY: dict[str, Any] = {
    "inputs": [{"name": "a.jsonl", "sha256": "1"}],
    "generated_by": {"model": "m", "temperature": 0.0},
}
FIRST, SECOND, THIRD = (("a-0", 0), ("a-0", 1), ("b-0", 0))
ANSWER = Answer("Hé\n🙂", True, [3, 2], "thought", [{"type": "function", "function": {"name": "f"}}])


def test_answers_come_back_as_they_were(tmp_path: Path) -> None:
    with open_work(tmp_path / "out", IDENTITY, 0) as work:
        work.put(FIRST, ANSWER)
        work.fail(SECOND, "reason")
        assert work.get(FIRST) == ANSWER
    with open_work(tmp_path / "out", IDENTITY, 0) as work:
        assert work.get(FIRST) == ANSWER
        assert work.get(SECOND) is None
        assert work.failed == {SECOND: "reason"}
        work.put(SECOND, Answer("then", False))
        assert not work.failed
    with open_work(tmp_path / "out", IDENTITY, 0) as work:
        assert work.get(SECOND) == Answer("then", False)
        assert not work.failed, "an answer counts, whatever failed before it"


def test_a_line_cut_at_any_byte_is_mended(tmp_path: Path) -> None:
    with open_work(tmp_path / "out", IDENTITY, 0) as work:
        work.put(FIRST, ANSWER)
        work.put(SECOND, ANSWER)
    part = folder_of(tmp_path / "out") / "part-00000.jsonl"
    whole = part.read_bytes()
    start = whole.index(b"\n") + 1
    for cut in range(start, len(whole)):
        part.write_bytes(whole[:cut])
        with open_work(tmp_path / "out", IDENTITY, 0) as work:
            assert work.get(FIRST) == ANSWER
            assert work.get(SECOND) is None
            work.put(SECOND, ANSWER)
        assert part.read_bytes() == whole


def test_workers_see_each_other_and_may_change_in_number(tmp_path: Path) -> None:
    with open_work(tmp_path / "out", IDENTITY, 0) as one, open_work(tmp_path / "out", IDENTITY, 1) as two:
        one.put(FIRST, ANSWER)
        two.put(SECOND, ANSWER)
        two.fail(THIRD, "reason")
        one.look()
        assert one.get(SECOND) == ANSWER
        assert one.failed == {THIRD: "reason"}
    part = folder_of(tmp_path / "out") / "part-00001.jsonl"
    part.write_bytes(part.read_bytes() + b'{"row_id": "b-0", "tu')
    with open_work(tmp_path / "out", IDENTITY, 0) as alone:
        assert alone.get(FIRST) == ANSWER
        assert alone.get(SECOND) == ANSWER
        assert alone.get(THIRD) is None


def test_a_second_run_is_refused(tmp_path: Path) -> None:
    told = pytest.raises(UserError, match="another run is writing there")
    with open_work(tmp_path / "out", IDENTITY, 0), told, open_work(tmp_path / "out", IDENTITY, 0):
        raise AssertionError("both runs write")
    with open_work(tmp_path / "out", IDENTITY, 0):
        pass


@pytest.mark.parametrize(
    ("other", "told"),
    [
        ({"generated_by": {"model": "n", "temperature": 0.0}}, "model m there, n now"),
        ({"generated_by": {"model": "m", "temperature": 1.0}}, "temperature 0.0 there, 1.0 now"),
        ({"generated_by": {"model": "m", "temperature": 0.0, "top_p": 0.9}}, "top_p None there, 0.9 now"),
        ({"inputs": [{"name": "a.jsonl", "sha256": "2"}]}, r"the input differs \(a.jsonl there\)"),
    ],
)
def test_another_model_setting_or_input_is_refused(tmp_path: Path, other: dict[str, Any], told: str) -> None:
    with open_work(tmp_path / "out", IDENTITY, 0):
        pass
    with pytest.raises(UserError, match=told), open_work(tmp_path / "out", {**IDENTITY, **other}, 0):
        raise AssertionError("opened all the same")


def test_a_model_that_moved_is_the_same_by_its_fingerprint(tmp_path: Path) -> None:
    made_by = {"model": "here", "fingerprint": "f"}
    with open_work(tmp_path / "out", {**IDENTITY, "generated_by": made_by}, 0):
        pass
    with open_work(tmp_path / "out", {**IDENTITY, "generated_by": {**made_by, "model": "there"}}, 0):
        pass


def test_damage_in_the_middle_is_named(tmp_path: Path) -> None:
    with open_work(tmp_path / "out", IDENTITY, 0) as work:
        work.put(FIRST, ANSWER)
        work.put(SECOND, ANSWER)
    part = folder_of(tmp_path / "out") / "part-00000.jsonl"
    part.write_bytes(b"{" + part.read_bytes())
    told = pytest.raises(UserError, match=r"part-00000.jsonl:1: damaged .*remove .*out.work")
    with told, open_work(tmp_path / "out", IDENTITY, 0):
        raise AssertionError("opened all the same")


GOOD = {"role": "assistant", "content": "x", "answer_ids": [3, 2], "finished": True}


@pytest.mark.parametrize(
    "line",
    [
        {"row_id": "b-0", "turn": 0},
        {"row_id": "b-0", "turn": 0, "answer": 5},
        {"row_id": "b-0", "turn": 0, "answer": {}},
        *[
            {"row_id": "b-0", "turn": 0, "answer": {**GOOD, **odd}}
            for odd in (
                {"content": None},
                {"answer_ids": "abc"},
                {"answer_ids": [-1]},
                {"answer_ids": [2**31]},
                {"answer_ids": [True]},
                {"finished": "yes"},
                {"reasoning_content": 5},
                {"tool_calls": [5]},
                {"tool_calls": [{"function": {"name": 5}}]},
            )
        ],
        {"row_id": 5, "turn": 0, "answer": GOOD},
        {"row_id": "b-0", "turn": "0", "answer": GOOD},
        {"row_id": "b-0", "turn": 0, "failed": [1]},
        5,
        [],
        "[" * 200_000,
        '"\\ud800',
        b"\xff",
    ],
)
def test_an_edited_line_is_named(tmp_path: Path, line: Any) -> None:
    with open_work(tmp_path / "out", IDENTITY, 0) as work:
        work.put(FIRST, ANSWER)
    part = folder_of(tmp_path / "out") / "part-00000.jsonl"
    written = line if isinstance(line, (str, bytes)) else json.dumps(line)
    written = written.encode() if isinstance(written, str) else written
    part.write_bytes(part.read_bytes() + written + b"\n")
    told = pytest.raises(UserError, match=r"part-00000.jsonl:2: .*; remove the line or .*out.work$")
    with told, open_work(tmp_path / "out", IDENTITY, 0):
        raise AssertionError("opened all the same")


@pytest.mark.parametrize(
    "edited",
    [
        json.dumps({**IDENTITY, "generated_by": 5}),
        json.dumps({**IDENTITY, "generated_by": ["model"]}),
        json.dumps({**IDENTITY, "inputs": [5]}),
        json.dumps({**IDENTITY, "inputs": 5}),
        "[" * 200_000,
    ],
)
def test_edited_settings_are_named(tmp_path: Path, edited: str) -> None:
    with open_work(tmp_path / "out", IDENTITY, 0):
        pass
    (folder_of(tmp_path / "out") / "settings.json").write_text(edited)
    told = pytest.raises(UserError, match=r"settings.json: .*(damaged|nested|JSON|another --out)")
    with told, open_work(tmp_path / "out", IDENTITY, 0):
        raise AssertionError("opened all the same")


@pytest.mark.parametrize(
    "edit",
    [{"failed": None}, {"read": 5}, {"answers": "many"}, {"generated_by": 5}, {"failures": [{}]}],
)
def test_an_edited_report_is_named(tmp_path: Path, edit: dict[str, Any]) -> None:
    read = {"skipped": {}, "bad": 0}
    counts = {"conversations": 1, "answers": 1, "unfinished": 0, "answer_tokens": 2, "empty": 0}
    good = {**IDENTITY, "read": read, **counts, "failed": 0, "failures": []}
    out = tmp_path / "out"
    out.touch()
    write_json(report_of(out), good)
    assert finished_report(out, IDENTITY) == good
    edited = {name: value for name, value in {**good, **edit}.items() if value is not None}
    write_json(report_of(out), edited)
    with pytest.raises(UserError, match=r"out.report.json: damaged or edited"):
        finished_report(out, IDENTITY)
