"""Training from 8-bit states: the same rows and nearly the same losses as from unrounded ones."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from eagle_train.config import Recipe
from eagle_train.shards.reader import open_shards
from eagle_train.targets.extract import extract
from eagle_train.training.loader import Loader
from eagle_train.training.loop import train
from eagle_train.training.metrics import read_metrics


@pytest.mark.parametrize(("codec", "most"), [("bf16", 0.003), ("fp8", 0.03), ("int8", 0.03)])
def test_losses_are_near_those_of_unrounded_states(
    tmp_path: Path,
    tiny: Callable[..., Recipe],
    tiny_shards_dir: Path,
    tiny_rows_dir: Path,
    tiny_target_dir: Path,
    codec: str,
    most: float,
) -> None:
    settings = {"dtype": "fp32", "device": "cpu", "batch_tokens": 512}  # as tiny_shards_dir
    extract(tiny_rows_dir, tiny_target_dir, tmp_path / codec, codec=codec, show=False, **settings)  # type: ignore[arg-type]
    losses = []
    for shards in (tiny_shards_dir, tmp_path / codec):
        run = tmp_path / f"run-{shards.name}"
        train(shards, tiny("run.steps=3"), run, show=False)
        losses.append(torch.tensor([line["loss"] for line in read_metrics(run) if line["step"] > 0]))
    exact, rounded = losses
    assert exact.shape == (3, 3)
    assert not torch.equal(exact, rounded)
    torch.testing.assert_close(rounded, exact, rtol=most, atol=0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_eight_bit_states_reach_the_step_in_the_dtype_of_training(
    tmp_path: Path, tiny_rows_dir: Path, tiny_target_dir: Path, dtype: torch.dtype
) -> None:
    extract(tiny_rows_dir, tiny_target_dir, tmp_path / "shards", codec="fp8", device="cpu", show=False)
    shards = open_shards(tmp_path / "shards", dtype=dtype)
    (batch,) = Loader(shards, "eagle3", 3, 10_000).evaluation([0, 1])
    assert batch.feature.dtype == batch.label_last.dtype == dtype
