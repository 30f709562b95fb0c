"""Two processes on gloo see the same rows, losses and gradients as one process with accumulation."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from eagle_train.io import load_tensors
from eagle_train.recipe_files import load_recipe
from eagle_train.training.loop import train
from eagle_train.training.metrics import read_metrics

# A large epsilon makes AdamW smooth in the gradient, so weights can be compared closely; clipping would hide
# a wrong scale of the gradient.
SETTINGS = [
    "optim.eps=1.0",
    "optim.lr=0.3",
    "optim.clip_norm=0",
    "schedule.warmup_steps=0",
    "data.tokens_per_step=null",
    "data.micro_tokens=250",
    "run.steps=6",
    "run.eval_every=3",
    "data.held_out=3",
]


def here(shards: Path, out: Path, *changes: str, resume: bool = False) -> dict:
    """Train in this one process."""
    return train(shards, load_recipe("eagle3-tiny", [*SETTINGS, *changes]), out, resume=resume, show=False)


def in_two(shards: Path, out: Path, *changes: str) -> subprocess.Popen:
    """Start the command in two processes."""
    words = [sys.executable, "-m", "eagle_cli.main", "train", str(shards), "--recipe", "eagle3-tiny"]
    words += ["--out", str(out), "--processes", "2"]
    words += [word for setting in (*SETTINGS, *changes) for word in ("--set", setting)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        words, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    )


def figures(out: Path) -> list[tuple]:
    lines = read_metrics(out)
    return [
        (
            line["step"],
            line["tokens"],
            line.get("loss"),
            line.get("accuracy"),
            line.get("tau"),
            line.get("grad_norm"),
        )
        for line in lines
    ]


def assert_equal_runs(one: Path, two: Path) -> None:
    for first, second in zip(figures(one), figures(two), strict=True):
        assert first[:2] == second[:2]
        assert second[4] == first[4], "acceptance length differs"
        assert second[2] == pytest.approx(first[2], abs=2e-6)
        assert second[3] == pytest.approx(first[3], abs=1e-6)
        assert second[5] == pytest.approx(first[5], abs=1e-5)
    for file in ("model.safetensors", "trainer.safetensors"):
        wanted, got = (load_tensors(out / "last" / file)[0] for out in (one, two))
        assert wanted.keys() == got.keys()
        for name in wanted:
            torch.testing.assert_close(
                got[name], wanted[name], rtol=0, atol=1e-6, msg=lambda m, n=name: f"{n}: {m}"
            )


@pytest.mark.parametrize("rows", [3, 1])
def test_two_processes_equal_one_with_accumulation(rows, tmp_path, tiny_shards_dir):
    """Three rows a step in bins of at most 250 tokens: uneven work. One row a step: fewer than processes."""
    two = in_two(tiny_shards_dir, tmp_path / "two", f"data.rows_per_step={rows}")
    here(tiny_shards_dir, tmp_path / "one", f"data.rows_per_step={rows}")
    _, words = two.communicate(timeout=300)
    assert two.returncode == 0, words
    assert json.loads((tmp_path / "two" / "run.json").read_text())["processes"] == 2
    assert_equal_runs(tmp_path / "one", tmp_path / "two")


def test_an_interrupted_run_of_two_saves_and_goes_on_with_one(tmp_path, tiny_shards_dir):
    out = tmp_path / "run"
    child = in_two(tiny_shards_dir, out, "data.rows_per_step=3", "run.steps=100000", "run.save_every=100000")
    deadline = time.monotonic() + 240
    while len(figures(out)) <= 3:
        assert child.poll() is None, child.stderr.read()
        assert time.monotonic() < deadline, "no step in four minutes"
        time.sleep(0.2)
    child.send_signal(signal.SIGTERM)
    _, words = child.communicate(timeout=120)
    assert child.returncode == 130, words
    assert "the same command again goes on" in words
    done = int((out / "last").resolve().name.removeprefix("step-"))
    assert done >= 3
    summary = here(tiny_shards_dir, out, "data.rows_per_step=3", f"run.steps={done + 2}", resume=True)
    assert summary["steps"] == done + 2
    assert [line[0] for line in figures(out)] == list(range(done + 3)), "a step was lost or done twice"
