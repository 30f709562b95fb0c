"""How a run of prepare ends: done before, another's folder, a dead worker, interruption, a full disk."""

from __future__ import annotations

import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import datasets
import pytest

from eagle_train.data import encoding
from eagle_train.data.prepare import _Counts
from eagle_train.data.rows import open_rows
from eagle_train.data.tokenizer import load_tokenizer
from eagle_train.errors import UserError

from .small import make, many, talk, target_with, write


def test_the_same_input_is_not_prepared_twice(
    tmp_path: Path, target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = write(tmp_path / "a.jsonl", [talk("Hi", "Hello")])
    made = make(data, target, tmp_path / "rows")
    monkeypatch.setattr("eagle_train.data.prepare.encode_all", None)  # nothing may be encoded any more
    again = make(data, target, tmp_path / "rows")
    assert again["reused"]
    assert not made["reused"]
    assert {**again, "reused": False} == made
    moved = tmp_path / "elsewhere"
    moved.mkdir()
    shutil.copy(data, moved / "a.jsonl")
    assert make(moved / "a.jsonl", target, tmp_path / "rows")["reused"]


def test_other_input_into_the_same_folder_is_refused_with_what_differs(
    tmp_path: Path, target: Path, byte_level: Any
) -> None:
    data = write(tmp_path / "a.jsonl", [talk("Hi", "Hello")])
    make(data, target, tmp_path / "rows")
    with pytest.raises(UserError, match="max_length 2048 there, 100 now; give another --out, or --overwrite"):
        make(data, target, tmp_path / "rows", max_length=100)
    with pytest.raises(UserError, match="template_fingerprint"):
        make(data, target, tmp_path / "rows", chat_template="vicuna")
    other = byte_level("chatml")
    other.add_tokens(["<more>"])
    with pytest.raises(UserError, match="tokenizer_fingerprint"):
        make(data, target_with(tmp_path / "other", other), tmp_path / "rows")
    write(data, [talk("Hi", "Bye")])  # the same path and name, other content
    with pytest.raises(UserError, match=r"the input files differ \(a\.jsonl there\)"):
        make(data, target, tmp_path / "rows")
    assert not make(data, target, tmp_path / "rows", overwrite=True)["reused"]
    assert (
        load_tokenizer(str(target)).decode(open_rows(tmp_path / "rows").dataset[0]["input_ids"]).count("Bye")
        == 1
    )
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.jsonl", "other", "rows"]


def test_a_folder_that_holds_other_things_is_never_replaced(tmp_path: Path, target: Path) -> None:
    data = write(tmp_path / "a.jsonl", [talk("Hi", "Hello")])
    mine = tmp_path / "mine"
    mine.mkdir()
    (mine / "thesis.txt").write_text("years of work")
    for overwrite in (False, True):
        with pytest.raises(UserError, match="holds no prepared rows"):
            make(data, target, mine, overwrite=overwrite)
    assert (mine / "thesis.txt").read_text() == "years of work"


def test_any_number_of_processes_gives_the_same_rows(tmp_path: Path, target: Path) -> None:
    data = write(tmp_path / "a.jsonl", many(600))
    one = make(data, target, tmp_path / "one", num_proc=1)
    three = make(data, target, tmp_path / "three", num_proc=3)
    assert one == three
    for name in ("state.json", "dataset_info.json", "data-00000-of-00001.arrow", "rows.json"):
        assert (tmp_path / "one" / name).read_bytes() == (tmp_path / "three" / name).read_bytes()


def test_a_dead_worker_is_an_error_not_a_hang(
    tmp_path: Path, target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    parent = os.getpid()
    real = encoding.encode

    def dying(*arguments: Any) -> Any:
        if os.getpid() != parent:
            os.kill(os.getpid(), signal.SIGKILL)
        return real(*arguments)

    monkeypatch.setattr(encoding, "encode", dying)
    data = write(tmp_path / "a.jsonl", many(600))
    with pytest.raises(UserError, match="one of the 2 worker processes died"):
        make(data, target, tmp_path / "rows", num_proc=2)
    assert list(tmp_path.iterdir()) == [data]


@pytest.mark.parametrize("processes", [1, 2])
def test_an_interrupted_run_leaves_nothing_and_no_worker(
    tmp_path: Path, target: Path, monkeypatch: pytest.MonkeyPatch, processes: int
) -> None:
    real = _Counts.passing

    def interrupted(self: Any, outcomes: Any) -> Any:
        for number, outcome in enumerate(real(self, outcomes)):
            if number == 300:
                assert len(_children(os.getpid())) >= processes - 1
                raise KeyboardInterrupt
            yield outcome

    monkeypatch.setattr(_Counts, "passing", interrupted)
    data = write(tmp_path / "a.jsonl", many(2000))
    with pytest.raises(KeyboardInterrupt):
        make(data, target, tmp_path / "rows", num_proc=processes)
    assert list(tmp_path.iterdir()) == [data]
    assert not any(_alive(child) for child in _children(os.getpid()))


_COMMAND = [sys.executable, "-m", "eagle_cli.main", "prepare"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("sent", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 130), (signal.SIGKILL, -9)]
)
def test_interruption_leaves_nothing_half_written(tmp_path: Path, target: Path, sent: int, code: int) -> None:
    data = tmp_path / "a.jsonl"
    with open(data, "w") as handle:
        for record in many(300) * 100:
            handle.write(json.dumps(record) + "\n")
    command = [
        *_COMMAND,
        str(data),
        "--target",
        str(target),
        "--out",
        str(tmp_path / "rows"),
        "--num-proc",
        "2",
    ]
    child = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, start_new_session=True)
    deadline = time.monotonic() + 60
    while len(_children(child.pid)) < 2 and time.monotonic() < deadline:
        time.sleep(0.05)
    workers = _children(child.pid)
    assert list(tmp_path.glob(".rows.*.tmp/*.arrow"))
    if sent == signal.SIGINT:
        os.killpg(child.pid, sent)  # as Ctrl-C does: to everyone in the terminal's group
    else:
        child.send_signal(sent)
    _, said = child.communicate(timeout=60)
    assert child.returncode == code
    assert not (tmp_path / "rows").exists()
    if sent == signal.SIGKILL:
        assert list(tmp_path.glob(".rows.*.tmp"))
    else:
        assert "Traceback" not in said
        assert not list(tmp_path.glob(".rows.*.tmp"))
    deadline = time.monotonic() + 20
    while any(_alive(worker) for worker in workers) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert len(workers) >= 2
    assert not any(_alive(worker) for worker in workers)
    write(data, many(3))
    make(data, target, tmp_path / "rows")  # the next run also clears what a killed one left
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.jsonl", "rows"]


def _children(process: int) -> list[int]:
    found = []
    for entry in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = entry.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[1]) == process:
            found.append(int(entry.parent.name))
    return found


def _alive(process: int) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_a_full_disk_is_one_line_and_leaves_nothing(tmp_path: Path, target: Path) -> None:
    """A limit on file size stands for the full disk: a write fails in the middle all the same."""
    data = write(tmp_path / "a.jsonl", many(600))
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))
    try:
        with pytest.raises(UserError) as caught:
            make(data, target, tmp_path / "rows")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert str(caught.value).startswith(f"{tmp_path / 'rows'}: ")
    assert "limit does not allow a file of that size" in str(caught.value)
    assert list(tmp_path.iterdir()) == [data]
    assert make(data, target, tmp_path / "rows")["rows"] == 600


def test_prepare_refuses_to_run_on_many_ranks(
    tmp_path: Path, target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(UserError, match="one process; start it without torchrun"):
        make(tmp_path, target, tmp_path / "rows")


def test_progress_bars_of_the_library_stay_as_they_were(tmp_path: Path, target: Path) -> None:
    before = datasets.are_progress_bars_disabled()
    make(write(tmp_path / "a.jsonl", many(3)), target, tmp_path / "rows")
    assert datasets.are_progress_bars_disabled() == before
