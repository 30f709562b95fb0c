"""Extraction in real processes: killed at bad moments and run again, started by --processes, by torchrun."""

from __future__ import annotations

import json
import multiprocessing
import os
import random
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from eagle_train.errors import UserError
from eagle_train.shards.reader import open_shards
from eagle_train.shards.schema import Plan
from eagle_train.targets import extract as room
from eagle_train.targets.extract import extract

from .processes import worker_of

_SMALL = {"batch_tokens": 256, "shard_tokens": 512, "dtype": "fp32", "device": "cpu"}
_SMALLER = {"batch_tokens": 128, "shard_tokens": 128}
_FLAGS = ["--batch-tokens", "256", "--shard-tokens", "512", "--dtype", "fp32", "--device", "cpu"]

_KILLED = """
import os, signal, sys
import safetensors.torch as st
moment, rows, target, out = sys.argv[1:]
own_save, own_replace = st.save_file, os.replace

def save(tensors, name, metadata=None):
    own_save(tensors, name, metadata=metadata)
    if moment == "inside a write" and "shard-00002" in name:
        with open(name, "r+b") as handle:
            handle.truncate(os.path.getsize(name) // 2)
        os.kill(os.getpid(), signal.SIGKILL)

def replace(source, final):
    if moment == "before a rename" and "shard-00002" in str(final):
        os.kill(os.getpid(), signal.SIGKILL)
    if moment == "before the manifest" and "shards.json" in str(final):
        os.kill(os.getpid(), signal.SIGKILL)
    own_replace(source, final)

st.save_file, os.replace = save, replace
from eagle_train.targets.extract import extract
extract(rows, target, out, batch_tokens=256, shard_tokens=512, dtype="fp32", device="cpu", show=False)
"""


def _bytes(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in sorted(folder.iterdir())}


@pytest.fixture(scope="module")
def whole(
    tmp_path_factory: pytest.TempPathFactory, tiny_rows_dir: Path, tiny_target_dir: Path
) -> dict[str, bytes]:
    """The bytes of an uninterrupted run in one process."""
    out = tmp_path_factory.mktemp("whole") / "out"
    extract(tiny_rows_dir, tiny_target_dir, out, show=False, **_SMALL)  # type: ignore[arg-type]
    return _bytes(out)


@pytest.mark.parametrize(
    "moment",
    [
        "inside a write",
        pytest.param("before a rename", marks=pytest.mark.slow),
        pytest.param("before the manifest", marks=pytest.mark.slow),
    ],
)
def test_killed_and_run_again_it_has_the_bytes_of_an_uninterrupted_run(
    moment: str, whole: dict[str, bytes], tiny_rows_dir: Path, tiny_target_dir: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    arguments = [moment, str(tiny_rows_dir), str(tiny_target_dir), str(out)]
    child = subprocess.run([sys.executable, "-c", _KILLED, *arguments], capture_output=True, timeout=300)
    assert child.returncode == -signal.SIGKILL, child.stderr.decode()
    assert not (out / "shards.json").exists()
    finished = len(list(out.glob("shard-*.safetensors")))
    assert finished == (7 if moment == "before the manifest" else 2)
    assert list(out.glob(".*.tmp"))
    summary = extract(tiny_rows_dir, tiny_target_dir, out, show=False, **_SMALL)  # type: ignore[arg-type]
    assert summary["shards_done_here"] == 7 - finished
    left = _bytes(out)
    assert {name: left[name] for name in whole} == whole
    assert not [name for name in left if name.startswith(".shard-0")]


def _one_of_ten(rows: Path, target: Path, out: Path, killed_at: int | None) -> None:
    """Extract in a forked process, which dies at a batch of its own."""
    if killed_at is not None:
        own, left = room.run_batch, [killed_at]

        def dies(*arguments: Any) -> Any:
            left[0] -= 1
            if left[0] < 0:
                os.kill(os.getpid(), signal.SIGKILL)
            return own(*arguments)

        room.run_batch = dies  # type: ignore[assignment]
    extract(rows, target, out, show=False, **{**_SMALL, **_SMALLER})  # type: ignore[arg-type]


def test_ten_workers_some_of_them_killed_write_every_row_once_and_the_same_bytes(
    tiny_rows_dir: Path, tiny_target_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    extract(tiny_rows_dir, tiny_target_dir, tmp_path / "alone", show=False, **{**_SMALL, **_SMALLER})  # type: ignore[arg-type]
    fork = multiprocessing.get_context("fork")
    killed_at = [0, 1, 2, *[None] * 7]
    workers = [
        fork.Process(target=_one_of_ten, args=(tiny_rows_dir, tiny_target_dir, tmp_path / "out", moment))
        for moment in killed_at
    ]
    for worker in workers:
        worker.start()
    with ThreadPoolExecutor(10) as pool:  # a dead one is waited for at once: nobody takes it for living
        list(pool.map(lambda worker: worker.join(600), workers))
    codes = [worker.exitcode for worker in workers]
    assert set(codes[:3]) <= {0, -signal.SIGKILL}  # 0: the others were done before it began
    assert codes[3:] == [0] * 7
    assert _bytes(tmp_path / "out") == _bytes(tmp_path / "alone")
    plan = json.loads((tmp_path / "out" / "plan.json").read_text())
    shards = open_shards(tmp_path / "out")
    assert len(plan["shards"]) > 15
    assert sorted(shards._index["rows"].tolist()) == list(range(24))


def test_two_runs_that_begin_together_agree_on_one_plan(
    tiny_rows_dir: Path, tiny_target_dir: Path, tmp_path: Path
) -> None:
    fork = multiprocessing.get_context("fork")
    gate = fork.Barrier(2)
    answers = fork.Queue()

    def begin(tokens: int) -> None:
        own = Plan.create

        def together(self: Plan, folder: Path) -> bool:
            gate.wait(300)
            return own(self, folder)

        Plan.create = together  # type: ignore[method-assign]
        try:
            settings = {**_SMALL, "shard_tokens": tokens}
            summary = extract(tiny_rows_dir, tiny_target_dir, tmp_path / "out", show=False, **settings)  # type: ignore[arg-type]
            answers.put((tokens, summary["shards"]))
        except UserError as error:
            answers.put((tokens, str(error)))

    workers = [fork.Process(target=begin, args=(tokens,)) for tokens in (512, 900)]
    for worker in workers:
        worker.start()
    found = dict(answers.get(timeout=300) for _ in workers)
    for worker in workers:
        worker.join(300)
    (refused,) = [text for text in found.values() if isinstance(text, str)]
    (shards,) = [count for count in found.values() if isinstance(count, int)]
    assert "shard tokens" in refused
    assert len(open_shards(tmp_path / "out").info["shards"]) == shards


def _eagle(*arguments: str | Path, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "eagle_cli.main", "extract", *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, **environment},
    )


def test_processes_share_the_work_and_write_the_same_bytes(
    whole: dict[str, bytes], tiny_rows_dir: Path, tiny_target_dir: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    done = _eagle(
        tiny_rows_dir, "--target", tiny_target_dir, "--out", out, "--processes", "2", "--json", *_FLAGS
    )
    assert done.returncode == 0, done.stderr
    assert "7 shards" in done.stderr
    assert "2 workers" in done.stderr
    summary = json.loads(done.stdout)
    assert summary["complete"] is True
    assert summary["rows"] == 24
    assert _bytes(out) == whole


@pytest.mark.slow
def test_torchrun_gives_the_same_bytes(
    whole: dict[str, bytes], tiny_rows_dir: Path, tiny_target_dir: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "3"]
    command += ["-m", "eagle_cli.main", "extract", str(tiny_rows_dir), "--target", str(tiny_target_dir)]
    done = subprocess.run([*command, "--out", str(out), *_FLAGS], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert f"next: eagle train {out}" in done.stdout
    assert _bytes(out) == whole


@pytest.mark.slow
def test_a_killed_worker_fails_the_command_and_the_next_run_mends_it(
    whole: dict[str, bytes], tiny_rows_dir: Path, tiny_target_dir: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    arguments = [tiny_rows_dir, "--target", tiny_target_dir, "--out", out, "--processes", "2", *_FLAGS]
    command = [sys.executable, "-m", "eagle_cli.main", "extract", *map(str, arguments)]
    parent = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    worker = worker_of(parent.pid, b"--worker")
    os.kill(worker, signal.SIGKILL)
    _, errors = parent.communicate(timeout=300)
    assert parent.returncode == 2
    assert " of 2 was ended by SIGKILL; memory may have run out; nothing finished is lost" in errors
    assert "Traceback" not in errors
    assert not (out / "shards.json").exists()
    assert _eagle(*arguments).returncode == 0
    left = _bytes(out)
    assert {name: left[name] for name in whole} == whole


@pytest.mark.slow
def test_killed_at_a_hundred_random_moments_it_ends_with_the_same_bytes(
    tiny_rows_dir: Path, tiny_target_dir: Path, tmp_path: Path
) -> None:
    settings = {**_SMALL, **_SMALLER}
    extract(tiny_rows_dir, tiny_target_dir, tmp_path / "alone", show=False, **settings)  # type: ignore[arg-type]
    whole, out, dice = _bytes(tmp_path / "alone"), tmp_path / "out", random.Random(0)
    fork = multiprocessing.get_context("fork")
    usual, kills, ends = 0.0, 0, 0  # seconds of the last run that came to its end
    while kills < 100:
        child = fork.Process(target=_one_of_ten, args=(tiny_rows_dir, tiny_target_dir, out, None))
        started = time.monotonic()
        child.start()
        child.join(dice.uniform(0.1, 1.1) * usual if usual else None)
        if child.is_alive():
            child.kill()
            kills += 1
        child.join()
        if child.exitcode == 0:
            usual = time.monotonic() - started
            ends += 1
            assert _bytes(out) == whole
            for name in dice.sample(sorted(whole), dice.randint(1, len(whole))):
                (out / name).unlink()
        else:
            assert child.exitcode == -signal.SIGKILL
    extract(tiny_rows_dir, tiny_target_dir, out, show=False, **settings)  # type: ignore[arg-type]
    assert ends > 1
    assert _bytes(out) == whole
