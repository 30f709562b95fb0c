"""Shards that pass by: training is that from shards that stay, and the disk never holds more than allowed."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from eagle_cli import options
from eagle_cli.main import main
from eagle_train.errors import UserError
from eagle_train.io.whole_folder import is_running
from eagle_train.recipe_files import load_recipe
from eagle_train.shards.codecs import CODECS, decode, encode
from eagle_train.shards.schema import Plan
from eagle_train.targets.produce import bytes_in
from eagle_train.training import checkpoints, passing
from eagle_train.training.engine import Engine
from eagle_train.training.loop import train
from eagle_train.training.metrics import read_metrics
from eagle_train.training.source import LiveTarget

MAX_DISK = 600_000
EPOCH = ["run.steps=null", "run.epochs=1"]


def figures(run: Path) -> list[tuple]:
    return [(line["step"], line["tokens"], line.get("loss"), line.get("tau")) for line in read_metrics(run)]


@pytest.fixture
def live(tiny_target_dir: Path) -> LiveTarget:
    return LiveTarget(str(tiny_target_dir), "fp32", batch_tokens=1, max_disk=MAX_DISK, codec="fp32")


@pytest.fixture
def same(weights) -> Callable[[Path, Path], None]:
    """Assert that two runs took the same steps to the same weights."""

    def compare(one: Path, other: Path) -> None:
        assert figures(one) == figures(other)
        first, second = weights(one / "last"), weights(other / "last")
        assert first.keys() == second.keys()
        assert all(torch.equal(first[name], second[name]) for name in first)

    return compare


@contextmanager
def watched(folder: Path) -> Iterator[list[int]]:
    """Give the sizes of a folder, looked at all the time."""
    sizes, ended = [0], threading.Event()

    def look() -> None:
        while not ended.wait(0.002):
            sizes.append(bytes_in(folder))

    thread = threading.Thread(target=look)
    thread.start()
    try:
        yield sizes
    finally:
        ended.set()
        thread.join()


def test_training_equals_that_from_shards_and_the_disk_never_holds_more(
    tmp_path, tiny, row_by_row, tiny_rows_dir, live, same, interrupt_after
):
    """Interrupted once; another order of rows does not go on."""
    recipe, run = tiny(*EPOCH), tmp_path / "passing"
    train(row_by_row("eagle3"), recipe, tmp_path / "shards", show=False)
    with watched(run / "shards") as sizes:
        interrupt_after(2)
        with pytest.raises(KeyboardInterrupt):
            train(tiny_rows_dir, recipe, run, live=live, show=False)
        assert checkpoints.newest(run).name == "step-000002"
        with pytest.raises(UserError, match="shards of another order of rows"):
            train(tiny_rows_dir, tiny(*EPOCH, "run.seed=1"), run, live=live, show=False)
        interrupt_after(-1)
        summary = train(tiny_rows_dir, recipe, run, live=live, show=False)
    assert Plan.load(run / "shards").size > 1.2 * MAX_DISK, "they all fit, and none had to go"
    assert 0.6 * MAX_DISK < max(sizes) <= MAX_DISK
    same(tmp_path / "shards", run)
    held_out = {f"shard-{number:05d}.safetensors" for number in range(2)}
    left = {"plan.json", "target.json", "target.safetensors", *held_out}
    assert {file.name for file in (run / "shards").iterdir()} == left
    assert train(tiny_rows_dir, recipe, run, live=live, show=False) == summary
    assert {file.name for file in (run / "shards").iterdir()} == left


def test_labels_are_their_likeliest_tokens_where_asked(
    tmp_path, tiny, row_by_row, tiny_rows_dir, live, same, capsys
):
    recipe, run = tiny(*EPOCH), tmp_path / "passing"
    live = replace(live, label_top_k=8)
    train(row_by_row("eagle3", 8), recipe, tmp_path / "shards", show=False)
    with watched(run / "shards") as sizes:
        train(tiny_rows_dir, recipe, run, live=live)
    assert "labels are the 8 likeliest tokens; the rest is spread evenly" in capsys.readouterr().err
    plan = Plan.load(run / "shards")
    assert plan.size > 1.2 * MAX_DISK
    assert max(sizes) <= MAX_DISK
    same(tmp_path / "shards", run)
    with pytest.raises(UserError, match="are made with label top k 8; this run has 0"):
        train(tiny_rows_dir, recipe, run, live=replace(live, label_top_k=0), show=False)


def test_another_target_does_not_go_on_where_no_shard_is_missing(
    tmp_path, tiny, tiny_rows_dir, make_tiny_target, live
):
    recipe, run = tiny(*EPOCH), tmp_path / "run"
    train(tiny_rows_dir, recipe, run, live=live, show=False)
    other = make_tiny_target(tmp_path / "other", seed=1)
    held = {file.name: file.read_bytes() for file in (run / "shards").iterdir()}
    with pytest.raises(UserError, match=r"these shards are made with target .*; this run has .*other"):
        train(tiny_rows_dir, recipe, run, live=replace(live, name=str(other)), show=False)
    assert {file.name: file.read_bytes() for file in (run / "shards").iterdir()} == held


@pytest.mark.slow
def test_after_a_crash_shards_that_were_removed_are_made_again(
    tmp_path, tiny, row_by_row, tiny_rows_dir, live, same, monkeypatch
):
    """The last checkpoint lies before them. A damaged one is made anew too; a stray file counts as held."""
    recipe, run, makers = tiny(*EPOCH, kind="eagle1"), tmp_path / "passing", []
    live = replace(live, max_disk=250_000)
    train(row_by_row("eagle1"), recipe, tmp_path / "shards", show=False)
    begin, update = passing.Maker.__init__, Engine.update

    def noted(self, job):
        makers.append(self)
        begin(self, job)

    monkeypatch.setattr(passing.Maker, "__init__", noted)
    monkeypatch.setattr(Engine, "update", crashing_after(7, update))
    with watched(run / "shards") as sizes, pytest.raises(RuntimeError, match="crash"):
        train(tiny_rows_dir, recipe, run, live=live, show=False)
    assert checkpoints.newest(run).name == "step-000004"
    first = run / "shards" / "shard-00000.safetensors"
    content = bytearray(first.read_bytes())
    content[-5] ^= 8
    first.write_bytes(content)
    monkeypatch.setattr(Engine, "update", update)
    stray = run / "shards" / "stray"
    stray.write_bytes(bytes(live.max_disk))
    with pytest.raises(UserError, match=r"stay, the next shard takes .* --max-disk is 244.1 KiB; give more"):
        train(tiny_rows_dir, recipe, run, live=live, show=False)
    stray.unlink()
    with watched(run / "shards") as more:
        train(tiny_rows_dir, recipe, run, live=live, show=False)
    assert max(sizes + more) <= live.max_disk
    same(tmp_path / "shards", run)
    assert len(makers) == 3
    assert not any(is_running(maker.child.pid) for maker in makers)


def crashing_after(steps: int, update: Callable) -> Callable:
    done = 0

    def crashing(*arguments):
        nonlocal done
        done += 1
        if done > steps:
            raise RuntimeError("crash")
        return update(*arguments)

    return crashing


@pytest.mark.parametrize(
    ("changes", "settings", "message"),
    [
        (
            ["run.epochs=2"],
            {},
            r"asks for \d+ steps, one epoch of these rows has \d+, and features pass",
        ),
        (["run.minutes=1"], {}, "asks for no number of steps"),
        (["run.epochs=1"], {"max_disk": 150_000}, r"too little for .* give \d+.\d KiB or more"),
        (["run.epochs=1"], {"dtype": "fp31"}, "dtype fp31: wanted auto, fp32"),
        (["run.epochs=1"], {"codec": "fp9"}, "--codec fp9: wanted one of"),
        (["run.epochs=1", "loss.top_k_weight=1"], {"label_top_k": 8}, r"-k 8; .* counts loss.top_k 10 of"),
        (
            ["run.epochs=1", "head.kind=eagle1", "head.draft_vocab_size=null"],
            {"label_top_k": 8},
            "top-k 8: --for eagle1 keeps the last states",
        ),
    ],
)
def test_what_cannot_be_is_refused_before_anything_is_made(
    changes, settings, message, tmp_path, tiny, tiny_rows_dir, live
):
    recipe = tiny("run.steps=null", *changes)
    with pytest.raises(UserError, match=message):
        train(tiny_rows_dir, recipe, tmp_path / "run", live=replace(live, **settings), show=False)
    assert not (tmp_path / "run").exists()


def test_rows_that_are_not_finite_stay_so_in_every_codec():
    states = torch.ones(3, 8)
    states[1, 2], states[2, 3] = float("nan"), float("inf")
    for codec in CODECS.values():
        found = decode(*encode(codec, states, 2)).isfinite().all(-1)
        assert found.tolist() == [True, False, False]


@pytest.mark.parametrize(
    ("text", "size"),
    [("200GB", 200 * 10**9), ("1.5GiB", 3 << 29), ("0.5 TiB", 1 << 39), ("700kb", 700_000), ("12B", 12)],
)
def test_sizes_are_read(text, size):
    assert options.parse_size("--max-disk", text) == size


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--max-disk", "12"], "--max-disk 12: wanted a size, such as 200GB or 1.5GiB"),
        (["--max-disk", "2GB", "--online"], "leave one of the two out"),
        (["--online", "--codec", "fp8"], "--online stores nothing, so --codec has no meaning"),
        (["--max-disk", "2GB"], "asks for 8 steps, one epoch of these rows has 2, and features pass by once"),
    ],
)
def test_options_that_do_not_fit_are_refused_in_one_line(
    words, message, tmp_path, tiny_rows_dir, tiny_target_dir, capsys
):
    given = ["train", tiny_rows_dir, "--target", tiny_target_dir, "--recipe", "eagle3-tiny"]
    given += ["--out", tmp_path / "run", "--set", "data.tokens_per_step=2000", *words]
    with pytest.raises(SystemExit) as caught:
        main([str(word) for word in given])
    err = capsys.readouterr().err
    assert caught.value.code == 2
    assert err.count("\n") == 1, err
    assert message in err
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_a_command_killed_twice_ends_in_the_same_weights(
    tmp_path, row_by_row, tiny_rows_dir, tiny_target_dir, same
):
    settings = ["run.steps=null", "run.epochs=1", "run.save_every=1"]
    train(row_by_row("eagle3"), load_recipe("eagle3-tiny", settings), tmp_path / "shards", show=False)
    run = tmp_path / "run"
    words = ["train", str(tiny_rows_dir), "--max-disk", f"{MAX_DISK}B", "--target", str(tiny_target_dir)]
    words += ["--dtype", "fp32", "--codec", "fp32", "--batch-tokens", "1", "--recipe", "eagle3-tiny"]
    words += ["--out", str(run), *(word for setting in settings for word in ("--set", setting))]
    with watched(run / "shards") as sizes:
        for wanted in ("step-000002", "step-000005", None):
            child = subprocess.Popen(
                [sys.executable, "-m", "eagle_cli.main", *words],
                stderr=subprocess.DEVNULL,
            )
            while child.poll() is None and not (wanted and (run / "checkpoints" / wanted).exists()):
                time.sleep(0.01)
            if wanted:
                child.send_signal(signal.SIGKILL)
                assert child.wait() == -signal.SIGKILL, "too fast to be killed"
    assert child.returncode == 0
    assert max(sizes) <= MAX_DISK
    same(tmp_path / "shards", run)
