"""The folder that only grows: cut lines, damage, other settings, two runs at once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from eagle_train.errors import UserError
from eagle_train.regenerate.answers import Answer
from eagle_train.regenerate.work import folder_of, open_work

IDENTITY: dict[str, Any] = {
    "inputs": [{"name": "a.jsonl", "sha256": "1"}],
    "generated_by": {"model": "m", "temperature": 0.0},
}
FIRST, SECOND, THIRD = (("a-0", 0), ("a-0", 1), ("b-0", 0))
ANSWER = Answer("Hé\n🙂", True, [3, 2], "thought", [{"type": "function"}])


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
            assert SECOND not in work
            work.put(SECOND, ANSWER)
        assert part.read_bytes() == whole


def test_workers_see_each_other_and_may_change_in_number(tmp_path: Path) -> None:
    with open_work(tmp_path / "out", IDENTITY, 0) as one, open_work(tmp_path / "out", IDENTITY, 1) as two:
        one.put(FIRST, ANSWER)
        two.put(SECOND, ANSWER)
        two.fail(THIRD, "reason")
        one.look()
        assert SECOND in one
        assert one.failed == {THIRD: "reason"}
    part = folder_of(tmp_path / "out") / "part-00001.jsonl"
    part.write_bytes(part.read_bytes() + b'{"row_id": "b-0", "tu')
    with open_work(tmp_path / "out", IDENTITY, 0) as alone:
        assert FIRST in alone
        assert SECOND in alone
        assert THIRD not in alone


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
    told = pytest.raises(UserError, match=r"part-00000.jsonl: damaged at byte 0 .*remove .*out.work")
    with told, open_work(tmp_path / "out", IDENTITY, 0):
        raise AssertionError("opened all the same")
