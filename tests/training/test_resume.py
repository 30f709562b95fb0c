"""An interrupted run goes on as if nothing had happened, and never from something half-written."""

from __future__ import annotations

import itertools
import json
import random
import shutil
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest
import torch

from eagle_train.errors import UserError
from eagle_train.recipe_files import load_recipe
from eagle_train.training import checkpoints, loop
from eagle_train.training.loop import train
from eagle_train.training.metrics import read_metrics


def figures(run):
    return [(line["step"], line.get("loss"), line.get("tau")) for line in read_metrics(run)]


@pytest.mark.parametrize("kind", ["adamw", "muon", "average", "layers", "eagle1"])
def test_resume_is_bit_exact_mid_epoch_and_three_times_in_a_row(
    kind, tmp_path, train_tiny, weights, interrupt_after
):
    """The first interrupt comes at a step whose evaluation is due."""
    settings = {
        "muon": ["optim.name=muon"],
        "average": ["optim.ema=0.9"],
        "layers": ["head.num_hidden_layers=2", "head.layer_ids=[2, 5]"],
    }.get(kind, [])
    settings += ["data.tokens_per_step=800", "run.steps=9"]
    head = {"kind": "eagle1" if kind == "eagle1" else "eagle3"}
    unbroken = train_tiny("whole", *settings, **head)
    for steps in (4, 2, 1):
        interrupt_after(steps)
        with pytest.raises(KeyboardInterrupt):
            train_tiny("broken", *settings, **head)
    assert checkpoints.newest(tmp_path / "broken").name == "step-000007"
    interrupt_after(-1)
    summary = train_tiny("broken", *settings, **head)
    whole, broken = (weights(tmp_path / run / "last") for run in ("whole", "broken"))
    assert whole.keys() == broken.keys()
    assert all(torch.equal(whole[name], broken[name]) for name in whole)
    assert {line["epoch"] for line in read_metrics(tmp_path / "whole")} >= {0, 1}, "no epoch was crossed"
    assert figures(tmp_path / "whole") == figures(tmp_path / "broken")
    for key in ("tau", "best_tau", "best_step", "tokens"):
        assert summary[key] == unbroken[key]


@pytest.mark.parametrize("steps", [None, 5])
def test_a_clock_that_ends_the_run_goes_on_from_where_it_stood(
    steps, tmp_path, train_tiny, interrupt_after, monkeypatch
):
    """Every reading of the clock is six seconds later, so one minute is ten steps; five may come before."""
    clock = itertools.count(step=6)
    monkeypatch.setattr(loop, "time", SimpleNamespace(monotonic=lambda: next(clock)))
    given = ["run.minutes=1", f"run.steps={'null' if steps is None else steps}", "data.held_out=0"]
    given += ["schedule.shape=linear", "schedule.warmup_steps=0"]
    for stop in (3, 1, -1):
        interrupt_after(stop)
        if stop > 0:
            with pytest.raises(KeyboardInterrupt):
                train_tiny("run", *given)
    done = train_tiny("run", *given)
    total = 10 if steps is None else steps
    lines = read_metrics(tmp_path / "run")
    assert [line["lr"] for line in lines] == pytest.approx([1e-3 * (1 - i / total) for i in range(total)])
    assert [line["seconds"] for line in lines] == [6.0 * i for i in range(1, total + 1)]
    assert done["steps"] == total


@pytest.mark.parametrize("number", [1, 2, 3])
def test_an_evaluation_cut_short_is_made_when_the_run_goes_on(
    number, tmp_path, train_tiny, interrupt_in_evaluation, capsys
):
    """The first (of the untrained head), one in the middle, the last."""
    unbroken = train_tiny("whole")
    interrupt_in_evaluation(number)
    with pytest.raises(KeyboardInterrupt):
        train_tiny("broken")
    stopped = (0, 4, 8)[number - 1]
    assert figures(tmp_path / "broken") == [
        (step, loss, None if step == stopped else tau)
        for step, loss, tau in figures(tmp_path / "whole")
        if 0 < step <= stopped or step < stopped
    ]
    interrupt_in_evaluation(-1)
    again = train_tiny("broken")
    assert figures(tmp_path / "broken") == figures(tmp_path / "whole")
    for key in ("tau", "best_tau", "best_step"):
        assert again[key] == unbroken[key]
    assert (tmp_path / "broken" / "best").resolve().name == f"step-{again['best_step']:06d}"


def test_a_run_killed_before_its_first_checkpoint_starts_anew_and_says_nothing_twice(
    tmp_path, train_tiny, capsys
):
    train_tiny("run")
    whole = figures(tmp_path / "run")
    shutil.rmtree(tmp_path / "run" / "checkpoints")
    assert "step 0" not in capsys.readouterr().err
    train_tiny("run", resume=True)
    assert "run: holds a run without any checkpoint: begins at step 0\n" in capsys.readouterr().err
    assert figures(tmp_path / "run") == whole


def test_the_same_command_goes_on_and_other_settings_are_refused(
    tmp_path, train_tiny, tiny_shards_eagle1_dir, interrupt_after
):
    run = tmp_path / "run"
    with pytest.raises(UserError, match="holds no run; leave --resume out"):
        train_tiny("run", resume=True)
    interrupt_after(2)
    with pytest.raises(KeyboardInterrupt):
        train_tiny("run")
    words = r"holds a run made with other settings: optim.lr=0.5 \(it had 0.001\)"
    with pytest.raises(UserError, match=words):
        train_tiny("run", "optim.lr=0.5")
    for fixed in ("run.seed=1", "data.tokens_per_step=99", "head.fc_norm=true", "optim.name=muon"):
        with pytest.raises(UserError, match=f"cannot change {fixed.split('=')[0]}"):
            train_tiny("run", fixed, resume=True)
    with pytest.raises(UserError, match=r"--resume .*leave --init-from somewhere out"):
        train_tiny("run", resume=True, init_from="somewhere")
    eagle1 = load_recipe("eagle1", ["data.held_out=2"])
    with pytest.raises(UserError, match="trained on other shards"):
        train(tiny_shards_eagle1_dir, eagle1, run, resume=True, show=False)
    interrupt_after(-1)
    assert train_tiny("run", "optim.lr=2e-3", resume=True)["steps"] == 8
    assert "lr: 0.002" in (run / "recipe.yaml").read_text()


def test_a_finished_run_stays_as_it_is(tmp_path, train_tiny):
    run = tmp_path / "run"
    first = train_tiny("run")
    before = {p: p.read_bytes() for p in run.rglob("*.safetensors")}
    again = train_tiny("run")
    assert again == first
    assert {p: p.read_bytes() for p in run.rglob("*.safetensors")} == before


def test_a_crash_before_the_pointers_were_set_is_mended(tmp_path, train_tiny, interrupt_after):
    run = tmp_path / "run"
    interrupt_after(5)
    with pytest.raises(KeyboardInterrupt):
        train_tiny("run")
    (run / "best").unlink()
    (run / "last").unlink()
    interrupt_after(-1)
    train_tiny("run")
    assert (run / "last").resolve().name == "step-000008"
    assert (run / "best" / "model.safetensors").is_file()


def test_a_best_checkpoint_that_was_deleted_is_chosen_anew(tmp_path, train_tiny):
    run = tmp_path / "run"
    train_tiny("run", "run.steps=12", "run.eval_every=2")
    record = json.loads((run / "last" / "trainer.json").read_text())
    record["state"] |= {"best_step": 3, "best_tau": 9.9}
    (run / "last" / "trainer.json").write_text(json.dumps(record))
    summary = train_tiny("run", "run.steps=14", "run.eval_every=2", resume=True)
    assert summary["best_step"] == 14
    assert (run / "best").resolve().name == "step-000014"


def test_lines_of_metrics_past_the_checkpoint_and_half_lines_are_dropped(
    tmp_path, train_tiny, interrupt_after
):
    run = tmp_path / "run"
    interrupt_after(3)
    with pytest.raises(KeyboardInterrupt):
        train_tiny("run")
    with open(run / "metrics.jsonl", "a") as file:
        file.write('{"step": 4, "loss": [1.0]}\n{"step": 5, "lo')
    interrupt_after(-1)
    train_tiny("run")
    assert [line["step"] for line in read_metrics(run)] == list(range(9))


@pytest.mark.slow
def test_a_run_killed_many_times_ends_in_the_same_weights(tmp_path, tiny, tiny_shards_dir, weights):
    """SIGKILL at random moments, many of them while a checkpoint is being written."""
    settings = ["run.steps=16", "run.save_every=1", "run.eval_every=8", "run.keep_last=3"]
    train(tiny_shards_dir, tiny(*settings), tmp_path / "whole", show=False)
    run, chance = tmp_path / "killed", random.Random(0)
    words = [sys.executable, "-m", "eagle_cli.main", "train", str(tiny_shards_dir), "--recipe", "eagle3-tiny"]
    words += ["--out", str(run), *(word for setting in settings for word in ("--set", setting))]
    kills = 0
    for _ in range(60):
        before = checkpoints.newest(run)
        child = subprocess.Popen(words, stderr=subprocess.DEVNULL)
        while child.poll() is None and checkpoints.newest(run) == before:
            time.sleep(0.01)
        time.sleep(chance.uniform(0, 0.15))
        if child.poll() is not None:
            break
        child.kill()
        child.wait()
        kills += 1
    assert child.returncode == 0
    assert kills >= 2, "too fast to be killed"
    whole, killed = weights(tmp_path / "whole" / "last"), weights(run / "last")
    assert all(torch.equal(whole[name], killed[name]) for name in whole)
    lines = [[(x["step"], x.get("loss")) for x in read_metrics(r)] for r in (tmp_path / "whole", run)]
    assert lines[0] == lines[1]
