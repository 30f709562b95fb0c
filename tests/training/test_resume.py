"""An interrupted run goes on as if nothing had happened, and never from something half-written."""

from __future__ import annotations

import json
import os
import random
import shutil
import subprocess
import sys
import time

import pytest
import torch

from eagle_train.errors import UserError
from eagle_train.recipe_files import load_recipe
from eagle_train.training import checkpoints
from eagle_train.training.loop import train
from eagle_train.training.metrics import read_metrics

EAGLE1 = ["head.kind=eagle1", "head.draft_vocab_size=null", "loss.noise=0.2"]


@pytest.mark.parametrize("kind", ["adamw", "muon", "eagle1"])
def test_resume_is_bit_exact_mid_epoch_and_twice_in_a_row(
    kind, tmp_path, tiny, weights, interrupt_after, tiny_shards_dir, tiny_shards_eagle1_dir
):
    if kind == "muon" and not hasattr(torch.optim, "Muon"):
        pytest.skip("this torch has no Muon")
    shards = tiny_shards_eagle1_dir if kind == "eagle1" else tiny_shards_dir
    recipe = tiny(
        *(EAGLE1 if kind == "eagle1" else [f"optim.name={kind}"]), "data.tokens_per_step=800", "run.steps=9"
    )
    train(shards, recipe, tmp_path / "whole", show=False)
    for steps in (3, 4):
        interrupt_after(steps)
        with pytest.raises(KeyboardInterrupt):
            train(shards, recipe, tmp_path / "broken", show=False)
    assert checkpoints.newest(tmp_path / "broken").name == "step-000007"
    interrupt_after(-1)
    train(shards, recipe, tmp_path / "broken", show=False)
    whole, broken = (weights(tmp_path / run / "last") for run in ("whole", "broken"))
    assert whole.keys() == broken.keys()
    assert all(torch.equal(whole[name], broken[name]) for name in whole)
    assert {line["epoch"] for line in read_metrics(tmp_path / "whole")} >= {0, 1}, "no epoch was crossed"
    figures = [
        [(line["step"], line.get("loss"), line.get("tau")) for line in read_metrics(tmp_path / run)]
        for run in ("whole", "broken")
    ]
    assert figures[0] == figures[1]


def test_a_half_written_checkpoint_is_never_chosen(tmp_path, tiny, tiny_shards_dir, capsys):
    run = tmp_path / "run"
    train(tiny_shards_dir, tiny(), run, show=False)
    good = checkpoints.newest(run)
    for step, broken in ((900, "trainer.json"), (901, "model.safetensors"), (902, None)):
        copy = shutil.copytree(good, run / f"checkpoints/step-{step:06d}")
        if broken:
            (copy / broken).unlink()
        else:
            whole = (copy / "trainer.safetensors").read_bytes()
            (copy / "trainer.safetensors").write_bytes(whole[:-1])
    shutil.copytree(good, run / "checkpoints/.step-000950.1.tmp")
    assert checkpoints.newest(run) == good
    summary = train(tiny_shards_dir, tiny("run.steps=9"), run, resume=True, show=False)
    assert summary["steps"] == 9
    assert not list((run / "checkpoints").glob(".*")), "leftovers stay for ever"


def test_the_same_command_goes_on_and_other_settings_are_refused(
    tmp_path, tiny, tiny_shards_dir, tiny_shards_eagle1_dir, interrupt_after
):
    run = tmp_path / "run"
    with pytest.raises(UserError, match="holds no run; leave --resume out"):
        train(tiny_shards_dir, tiny(), run, resume=True, show=False)
    interrupt_after(2)
    with pytest.raises(KeyboardInterrupt):
        train(tiny_shards_dir, tiny(), run, show=False)
    words = r"holds a run made with other settings: optim.lr=0.5 \(it had 0.001\)"
    with pytest.raises(UserError, match=words):
        train(tiny_shards_dir, tiny("optim.lr=0.5"), run, show=False)
    for fixed in ("run.seed=1", "data.tokens_per_step=99", "head.fc_norm=true"):
        with pytest.raises(UserError, match=f"cannot change {fixed.split('=')[0]}"):
            train(tiny_shards_dir, tiny(fixed), run, resume=True, show=False)
    eagle1 = load_recipe("eagle1", ["data.held_out=2"])
    with pytest.raises(UserError, match="trained on other shards"):
        train(tiny_shards_eagle1_dir, eagle1, run, resume=True, show=False)
    interrupt_after(-1)
    assert train(tiny_shards_dir, tiny("optim.lr=2e-3"), run, resume=True, show=False)["steps"] == 8
    assert "lr: 0.002" in (run / "recipe.yaml").read_text()


def test_a_finished_run_stays_as_it_is(tmp_path, tiny, tiny_shards_dir):
    run = tmp_path / "run"
    first = train(tiny_shards_dir, tiny(), run, show=False)
    before = {p: p.read_bytes() for p in run.rglob("*.safetensors")}
    again = train(tiny_shards_dir, tiny(), run, show=False)
    assert again == first
    assert {p: p.read_bytes() for p in run.rglob("*.safetensors")} == before


def test_a_crash_before_the_pointers_were_set_is_mended(tmp_path, tiny, tiny_shards_dir, interrupt_after):
    run = tmp_path / "run"
    interrupt_after(5)
    with pytest.raises(KeyboardInterrupt):
        train(tiny_shards_dir, tiny(), run, show=False)
    (run / "best").unlink()
    (run / "last").unlink()
    interrupt_after(-1)
    train(tiny_shards_dir, tiny(), run, show=False)
    assert (run / "last").resolve().name == "step-000008"
    assert (run / "best" / "model.safetensors").is_file()


def test_a_best_checkpoint_that_was_deleted_is_chosen_anew(tmp_path, tiny, tiny_shards_dir):
    run = tmp_path / "run"
    train(tiny_shards_dir, tiny("run.steps=12", "run.eval_every=2"), run, show=False)
    record = json.loads((run / "last" / "trainer.json").read_text())
    record["state"] |= {"best_step": 3, "best_tau": 9.9}
    (run / "last" / "trainer.json").write_text(json.dumps(record))
    summary = train(tiny_shards_dir, tiny("run.steps=14", "run.eval_every=2"), run, resume=True, show=False)
    assert summary["best_step"] == 14
    assert (run / "best").resolve().name == "step-000014"


def test_lines_of_metrics_past_the_checkpoint_and_half_lines_are_dropped(
    tmp_path, tiny, tiny_shards_dir, interrupt_after
):
    run = tmp_path / "run"
    interrupt_after(3)
    with pytest.raises(KeyboardInterrupt):
        train(tiny_shards_dir, tiny(), run, show=False)
    with open(run / "metrics.jsonl", "a") as file:
        file.write('{"step": 4, "loss": [1.0]}\n{"step": 5, "lo')
    interrupt_after(-1)
    train(tiny_shards_dir, tiny(), run, show=False)
    assert [line["step"] for line in read_metrics(run)] == list(range(9))


@pytest.mark.slow
def test_a_run_killed_many_times_ends_in_the_same_weights(tmp_path, tiny, tiny_shards_dir, weights):
    """SIGKILL at random moments, many of them while a checkpoint is being written."""
    settings = ["run.steps=16", "run.save_every=1", "run.eval_every=8", "run.keep_last=3"]
    torch.set_num_threads(1)
    train(tiny_shards_dir, tiny(*settings), tmp_path / "whole", show=False)
    run, chance = tmp_path / "killed", random.Random(0)
    words = [sys.executable, "-m", "eagle_cli.main", "train", str(tiny_shards_dir), "--recipe", "eagle3-tiny"]
    words += ["--out", str(run), *(word for setting in settings for word in ("--set", setting))]
    kills = 0
    for _ in range(60):
        before = checkpoints.newest(run)
        child = subprocess.Popen(words, env={**os.environ, "OMP_NUM_THREADS": "1"}, stderr=subprocess.DEVNULL)
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
