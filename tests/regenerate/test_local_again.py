"""The same call again in process: finished, changed, interrupted, killed, or shared out among workers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from eagle_cli.main import main
from eagle_train.errors import UserError
from eagle_train.regenerate import workers
from eagle_train.regenerate.answers import AnswerSettings
from eagle_train.regenerate.work import folder_of
from eagle_train.targets.load import Target

from .asking import chats, command, kill_after, shown, write
from .local import HOW, make


def test_a_second_time_nothing_is_done(
    tmp_path: Path, target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = write(tmp_path / "a.jsonl", chats(4))
    first = make(data, target, tmp_path / "out.jsonl")
    before = (tmp_path / "out.jsonl").read_bytes()
    monkeypatch.setattr("eagle_train.regenerate.local.decode", None)
    assert make(data, target, tmp_path / "out.jsonl") == {**first, "reused": True}
    assert (tmp_path / "out.jsonl").read_bytes() == before


def test_another_setting_model_or_input_into_the_same_output_is_refused(
    tmp_path: Path, target: Target, make_tiny_target: Any
) -> None:
    data = write(tmp_path / "a.jsonl", chats(2))
    make(data, target, tmp_path / "out.jsonl")
    before = (tmp_path / "out.jsonl").read_bytes()
    with pytest.raises(UserError, match="max_new_tokens 24 there, 5 now; give another --out"):
        make(data, target, tmp_path / "out.jsonl", settings=AnswerSettings(max_new_tokens=5))
    other = make_tiny_target(tmp_path / "other", seed=3, num_layers=4)
    with pytest.raises(UserError, match=r"fingerprint .* there, .* now"):
        make(data, other, tmp_path / "out.jsonl")
    with pytest.raises(UserError, match="template_fingerprint"):
        make(data, target, tmp_path / "out.jsonl", chat_template="vicuna")
    with pytest.raises(UserError, match="the input differs"):
        make(write(tmp_path / "b.jsonl", chats(3)), target, tmp_path / "out.jsonl")
    assert (tmp_path / "out.jsonl").read_bytes() == before


def test_a_file_of_something_else_is_never_replaced(tmp_path: Path, target: Target) -> None:
    mine = tmp_path / "mine.jsonl"
    mine.write_text("years of work")
    with pytest.raises(UserError, match="not made by eagle regenerate"):
        make(write(tmp_path / "a.jsonl", chats(1)), target, mine)
    assert mine.read_text() == "years of work"


@pytest.mark.parametrize("after", [0, 1, 7, 25])
def test_an_interrupted_run_goes_on_where_it_was(
    tmp_path: Path,
    target: Target,
    expected: list[dict[str, Any]],
    monkeypatch: pytest.MonkeyPatch,
    after: int,
) -> None:
    from eagle_train.regenerate import local
    from eagle_train.regenerate.work import Work

    data = write(tmp_path / "a.jsonl", chats())
    put, done = Work.put, []

    def interrupted(self: Work, key: Any, answer: Any) -> None:
        if len(done) == after:
            raise KeyboardInterrupt
        done.append(key)
        put(self, key, answer)

    monkeypatch.setattr(Work, "put", interrupted)
    with pytest.raises(KeyboardInterrupt):
        make(data, target, tmp_path / "out.jsonl")
    assert not (tmp_path / "out.jsonl").exists()
    monkeypatch.setattr(Work, "put", put)
    asked: list[int] = []
    decode = local.decode
    monkeypatch.setattr(
        local, "decode", lambda target, jobs, *more: asked.append(len(jobs)) or decode(target, jobs, *more)
    )
    make(data, target, tmp_path / "out.jsonl", num_slots=3)
    assert shown(tmp_path / "out.jsonl") == expected
    total = sum(m["role"] == "assistant" for record in expected for m in record["messages"])
    assert total - after <= sum(asked) <= total - after + len(chats()), "finished answers are not made again"


def test_ranks_share_the_work_and_the_last_one_writes(
    tmp_path: Path, target: Target, expected: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    data = write(tmp_path / "a.jsonl", chats())
    monkeypatch.setenv("WORLD_SIZE", "3")
    for rank in ("2", "0"):
        monkeypatch.setenv("RANK", rank)
        assert make(data, target, tmp_path / "out.jsonl") == {"reused": False, "complete": False}
        assert not (tmp_path / "out.jsonl").exists()
    monkeypatch.setenv("RANK", "1")
    assert make(data, target, tmp_path / "out.jsonl")["complete"]
    assert shown(tmp_path / "out.jsonl") == expected


def test_killed_at_any_moment_and_given_again(
    tmp_path: Path, ending_target_dir: Path, expected: list[dict[str, Any]]
) -> None:
    """A real process, killed without a word once it has written some answers."""
    data = write(tmp_path / "a.jsonl", chats())
    out = tmp_path / "out.jsonl"
    part = folder_of(out) / "part-00000.jsonl"
    kill_after(3, command(data, ending_target_dir, out, *HOW), part)
    assert not out.exists()
    make(data, ending_target_dir, out)
    assert shown(out) == expected


def test_the_command_starts_workers_with_what_was_typed(
    tmp_path: Path,
    ending_target_dir: Path,
    expected: list[dict[str, Any]],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Each worker's command line is run here, one after the other, as the ranks of a launch."""
    data = write(tmp_path / "a.jsonl", chats())
    out = tmp_path / "out.jsonl"
    launched: list[list[str]] = []

    def in_turn(processes: int, arguments: list[str]) -> None:
        launched.append(arguments)
        for rank in range(processes):
            with pytest.MonkeyPatch.context() as patch, pytest.raises(SystemExit) as left:
                patch.setenv("RANK", str(rank))
                patch.setenv("WORLD_SIZE", str(processes))
                main(arguments)
            assert not left.value.code

    monkeypatch.setattr(workers, "relaunch", in_turn)
    with pytest.raises(SystemExit) as left:
        main([*command(data, ending_target_dir, out, *HOW)[3:], "--processes", "2", "--template-arg", "a=b"])
    assert not left.value.code
    (typed,) = launched
    assert (typed[:2], typed[-1]) == (["regenerate", str(data)], "--worker")
    for option, value in (("--max-new-tokens", "24"), ("--batch", "4"), ("--template-arg", "a=b")):
        assert typed[typed.index(option) + 1] == value
    assert "--processes" not in typed
    assert shown(out) == expected
    said = capsys.readouterr().out.splitlines()
    answers = sum(m["role"] == "assistant" for record in expected for m in record["messages"])
    assert said[0].startswith(f"{len(expected)} conversations, {answers} answers (")
    assert said[-1] == f"next: eagle prepare {out} --target {ending_target_dir} --out rows/"
    assert sum(" conversations, " in line for line in said) == 1, "the workers print nothing"
