"""Two processes on gloo see the same rows, losses and gradients as one process with accumulation."""

from __future__ import annotations

import dataclasses
import json
import math
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from eagle_train.heads.disk import load_head
from eagle_train.io.tensors import load_tensors
from eagle_train.recipe_files import load_recipe
from eagle_train.training.loop import train
from eagle_train.training.metrics import read_metrics

from . import cases


def command(*words: str) -> subprocess.Popen:
    return subprocess.Popen(
        [sys.executable, *words],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.fixture(scope="module")
def runs(
    tmp_path_factory, tiny_shards_dir, tiny_shards_eagle1_dir, tiny_rows_dir, tiny_target_dir
) -> Callable[[str], list[Path]]:
    """Every case of cases.py in one launch of two processes; return the run folders of one and of two."""
    out = tmp_path_factory.mktemp("processes")
    sources = map(str, (tiny_shards_dir, tiny_shards_eagle1_dir, tiny_rows_dir, tiny_target_dir))
    one = cases.Places(*sources, str(out / "one"))
    two = dataclasses.replace(one, out=str(out / "two"))
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", str(Path(cases.__file__))]
    launch += dataclasses.astuple(two)
    cases.run("begun by one, going on", two, until=3)
    child = command(*launch)
    for name in cases.CASES:
        cases.run(name, one)
    _, stderr = child.communicate(timeout=900)
    assert child.returncode == 0, stderr
    assert "deprecated" not in stderr
    return lambda name: [out / "one" / name, out / "two" / name]


def figures(out: Path) -> list[tuple]:
    keys = ("step", "tokens", "loss", "accuracy", "tau", "grad_norm")
    return [tuple(line.get(key) for key in keys) for line in read_metrics(out)]


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


@pytest.mark.parametrize("name", ["three rows a step", "one row a step", "eagle1, one row a step"])
def test_two_processes_equal_one_with_accumulation(name, runs):
    """Three rows in bins of at most 250 tokens: uneven work. One row: a process in which nothing counts."""
    one, two = runs(name)
    assert json.loads((two / "run.json").read_text())["processes"] == 2
    assert_equal_runs(one, two)


@pytest.mark.parametrize("source", ["online", "passing"])
def test_two_processes_on_rows_equal_one_and_training_from_shards(source, runs):
    one, two = runs(f"{source}, three rows a step")
    assert_equal_runs(one, two)
    assert_equal_runs(runs("three rows a step")[0], two)


@pytest.mark.parametrize("name", ["zero2, three rows a step", "zero3, one row a step"])
def test_partitioned_weights_train_as_whole_ones(name, runs):
    """The checkpoint is the same, tensor by tensor."""
    pytest.importorskip("deepspeed")
    assert_equal_runs(*runs(name))


@pytest.mark.parametrize("name", ["begun by one, going on", "zero2, going on", "zero3, going on"])
def test_a_run_of_two_that_goes_on_equals_an_unbroken_one_of_one(name, runs):
    """From a checkpoint of one process or of the same stage; a head of two layers reads two features."""
    if name.startswith("zero"):
        pytest.importorskip("deepspeed")
    one, two = runs(name)
    assert load_head(two / "last").config.feature_layers == (2, 5)
    assert_equal_runs(one, two)


@pytest.mark.parametrize("name", ["three rows a step", "zero3, one row a step"])
def test_a_run_of_two_goes_on_in_one_process(name, runs, tmp_path, tiny_shards_dir):
    if name.startswith("zero"):
        pytest.importorskip("deepspeed")
    recipe = load_recipe("eagle3-tiny", [*cases.SETTINGS, *cases.CASES[name], "run.steps=8"])
    copies = [shutil.copytree(out, tmp_path / out.parent.name, symlinks=True) for out in runs(name)]
    for out in copies:
        assert train(tiny_shards_dir, recipe, out, resume=True, show=False)["steps"] == 8
    assert_equal_runs(*copies)


def test_partitioned_bf16_weights_have_float32_masters_that_are_saved(runs):
    pytest.importorskip("deepspeed")
    one, two = runs("zero2, bf16")
    losses = [[line["loss"][0] for line in read_metrics(out)[1:]] for out in (one, two)]
    assert losses[1] == pytest.approx(losses[0], rel=0.03)
    weight = load_head(two / "last").fc.weight
    assert weight.dtype == torch.float32
    assert not torch.equal(weight, weight.bfloat16().float())


@pytest.mark.parametrize("name", ["one row is NaN", "zero3, one row is NaN"])
def test_a_gradient_that_is_not_finite_on_one_process_skips_the_step_on_both(name, runs):
    if name.startswith("zero"):
        pytest.importorskip("deepspeed")
    one, two = runs(name)
    skipped = [[line["grad_norm"] is None for line in read_metrics(out)[1:]] for out in (one, two)]
    assert skipped[0] == skipped[1]
    assert sum(skipped[1]) == 1
    assert_equal_runs(one, two)
    for value in load_tensors(two / "last" / "model.safetensors")[0].values():
        assert math.isfinite(float(value.double().sum()))


def test_an_interrupted_run_of_two_saves_and_goes_on_with_one(tmp_path, tiny_shards_dir):
    out = tmp_path / "run"
    settings = [*cases.SETTINGS, "data.rows_per_step=3", "run.steps=100000", "run.save_every=100000"]
    words = ["train", str(tiny_shards_dir), "--recipe", "eagle3-tiny", "--out", str(out), "--processes", "2"]
    words += [word for setting in settings for word in ("--set", setting)]
    child = command("-m", "eagle_cli.main", *words)
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
    recipe = load_recipe("eagle3-tiny", [*settings, f"run.steps={done + 2}"])
    summary = train(tiny_shards_dir, recipe, out, resume=True, show=False)
    assert summary["steps"] == done + 2
    assert [line[0] for line in figures(out)] == list(range(done + 3)), "a step was lost or done twice"
