"""Features from a pretend GPU are those from the CPU, whichever GPUs they come from."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from eagle_train.io.tensors import load_tensors
from eagle_train.shards.writer import ShardBuffer
from eagle_train.targets.extract import extract

FP32: Any = {"codec": "fp32", "dtype": "fp32", "batch_tokens": 512, "show": False}


def assert_same_shards(one: Path, other: Path, close: float = 1e-4) -> None:
    files = sorted(file.name for file in one.glob("shard-*.safetensors"))
    assert files
    for file in files:
        wanted, got = (load_tensors(folder / file)[0] for folder in (one, other))
        assert wanted.keys() == got.keys()
        for name, tensor in wanted.items():
            torch.testing.assert_close(
                got[name], tensor, rtol=close, atol=close * float(tensor.float().abs().max())
            )


@pytest.mark.parametrize("device", ["cuda", "cuda:1"])
def test_features_from_a_gpu_are_there_before_they_are_written(
    device, gpus, tiny_shards_dir, tiny_rows_dir, tiny_target_dir, tmp_path, monkeypatch
):
    """Also from one that is not the first, in whose memory nothing is taken then."""
    pinned = []

    def seen(*given: Any) -> None:
        pinned.append(torch.cuda.current_device())
        begin(*given)

    begin = ShardBuffer.__init__
    monkeypatch.setattr(ShardBuffer, "__init__", seen)
    extract(tiny_rows_dir, tiny_target_dir, tmp_path, features="eagle3", device=device, **FP32)
    assert_same_shards(tiny_shards_dir, tmp_path)
    assert set(pinned) == {torch.device(device).index or 0}
    assert torch.cuda.current_device() == 0


@pytest.mark.parametrize(("tied", "more"), [(False, {}), (True, {"label_top_k": 4, "codec": "int8"})])
def test_features_of_a_target_spread_over_gpus(
    tied, more, gpus, spread, make_tiny_target, tiny_rows_dir, tmp_path
):
    """Also where the lm_head, tied to the embedding, does not lie where the last states are."""
    target = make_tiny_target(tmp_path / "target", tied=tied)
    given = {**FP32, "features": "eagle3" if tied else "all", **more}
    extract(tiny_rows_dir, target, tmp_path / "cpu", device="cpu", **given)
    extract(tiny_rows_dir, target, tmp_path / "gpus", device_map=spread(lm_head=int(not tied)), **given)
    assert_same_shards(tmp_path / "cpu", tmp_path / "gpus", 1e-4 if not tied else 1e-2)
