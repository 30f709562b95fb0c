"""Training on a pretend GPU takes the steps that it takes on the CPU."""

from __future__ import annotations

from pathlib import Path

import pytest

from eagle_train.heads import fused_cuda
from eagle_train.recipe_files import load_recipe
from eagle_train.targets.extract import extract
from eagle_train.training.dry_run import dry_run
from eagle_train.training.loop import train
from eagle_train.training.metrics import read_metrics
from eagle_train.training.source import LiveTarget

from .pretend import pretend_cuda

EAGLE1 = ["head.kind=eagle1", "head.draft_vocab_size=null", "loss.noise=0.2"]
MEDUSA = ["head.kind=medusa", "head.medusa_heads=2", "head.draft_vocab_size=null"]
SHORT = ["run.steps=2", "run.eval_every=2", "run.save_every=2", "optim.eps=1e-3"]  # smooth in the gradient


def figures(run: Path) -> list[tuple]:
    return [(line["step"], line["tokens"], line.get("loss"), line.get("tau")) for line in read_metrics(run)]


def assert_same_course(one: Path, other: Path, close: float) -> None:
    courses = figures(one), figures(other)
    assert len(courses[0]) == len(courses[1]) > 1
    for wanted, got in zip(*courses, strict=True):
        assert got[:2] == wanted[:2]
        assert got[2] == pytest.approx(wanted[2], abs=close)
        assert got[3] == pytest.approx(wanted[3], abs=0.02)


@pytest.mark.parametrize(
    ("overrides", "close"),
    [
        (["optim.name=muon", "optim.ema=0.9"], 1e-4),
        ([*EAGLE1, "loss.ttt_steps=2", "loss.top_k_weight=1"], 1e-4),
        ([*MEDUSA, "run.precision=bf16"], 1e-2),
    ],
)
def test_a_run_on_a_gpu_is_that_on_the_cpu(
    overrides, close, tiny_shards_dir, tiny_shards_eagle1_dir, tmp_path, monkeypatch
):
    shards = tiny_shards_eagle1_dir if "head.kind=eagle1" in overrides else tiny_shards_dir
    recipe = load_recipe("eagle3-tiny", [*SHORT, *overrides])
    train(shards, recipe, tmp_path / "cpu", show=False)
    called = []
    monkeypatch.setattr(
        fused_cuda, "backward", lambda *a, real=fused_cuda.backward: called.append(1) or real(*a)
    )
    with pretend_cuda():
        made = train(shards, recipe, tmp_path / "gpu", show=False)
    assert made["device"] == "cuda"
    assert_same_course(tmp_path / "cpu", tmp_path / "gpu", close)
    assert bool(called) == (recipe.head.kind != "medusa")


def test_a_step_from_8_bit_shards_made_on_a_gpu_is_that_on_the_cpu(tiny_rows_dir, tiny_target_dir, tmp_path):
    recipe, shards = load_recipe("eagle3-tiny", [*SHORT, "run.steps=1"]), tmp_path / "shards"
    with pretend_cuda():
        extract(tiny_rows_dir, tiny_target_dir, shards, codec="fp8", label_top_k=4, show=False)
        train(shards, recipe, tmp_path / "gpu", show=False)
    train(shards, recipe, tmp_path / "cpu", show=False)
    assert_same_course(tmp_path / "cpu", tmp_path / "gpu", 1e-4)


def test_a_run_goes_on_from_a_checkpoint_in_bf16_and_starts_from_layers_and_heads(
    gpu, tiny_shards_dir, tmp_path
):
    """`auto` is bf16 here; optimizer state, average and weights go back to the device."""
    more = ["run.precision=auto", "optim.name=muon", "optim.ema=0.9", "head.init_layer=7"]
    for steps in (2, 4):
        recipe = load_recipe("eagle3-tiny", [*SHORT, *more, f"run.steps={steps}"])
        made = train(tiny_shards_dir, recipe, tmp_path / "parts", resume=steps > 2, show=False)
        assert made["precision"] == "bfloat16"
        assert figures(tmp_path / "parts")[-1][0] == steps
    start = load_recipe("eagle3-tiny", [*SHORT, "run.steps=1"])
    train(tiny_shards_dir, start, tmp_path / "warm", init_from=str(tmp_path / "parts" / "best"), show=False)
    assert len(figures(tmp_path / "warm")) > 1


def test_a_target_on_another_gpu_teaches_while_training(tiny_rows_dir, tiny_target_dir, tmp_path):
    recipe = load_recipe("eagle3-tiny", [*SHORT, "data.held_out=4"])
    target = str(tiny_target_dir)
    train(tiny_rows_dir, recipe, tmp_path / "cpu", live=LiveTarget(target, "fp32"), show=False)
    with pretend_cuda(2):
        live = LiveTarget(target, "fp32", device="cuda:1")
        train(tiny_rows_dir, recipe, tmp_path / "other", live=live, show=False)
    assert_same_course(tmp_path / "cpu", tmp_path / "other", 1e-4)


def test_one_row_is_learned_by_heart_on_a_gpu(gpu, tiny_shards_dir, monkeypatch):
    monkeypatch.setattr("eagle_train.training.dry_run.MOST_STEPS", 2)
    found = dry_run(tiny_shards_dir, load_recipe("eagle3-tiny", ["run.precision=auto"]), show=False)
    assert found.steps == 2
