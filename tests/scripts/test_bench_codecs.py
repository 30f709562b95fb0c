"""Shards recoded by scripts/bench_codecs.py are shards that training reads."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import torch

from eagle_train.shards import upkeep
from eagle_train.shards.reader import open_shards


def test_recoded_shards_are_read_as_any_others(
    tmp_path: Path, tiny_shards_dir: Path, script: Callable[[str], ModuleType]
) -> None:
    errors = script("bench_codecs").recode(tiny_shards_dir, tmp_path / "fp8", "fp8")
    assert all(0 < one["error"] <= one["worst_token"] < 0.1 for one in errors.values())
    true, stored = open_shards(tiny_shards_dir), open_shards(tmp_path / "fp8")
    assert stored.info["codec"] == "fp8"
    for i in range(true.num_rows):
        one, other = true.read(i), stored.read(i)
        assert torch.equal(one.input_ids, other.input_ids)
        assert one.label_last.shape == other.label_last.shape
        assert not torch.equal(one.label_last, other.label_last)
    assert upkeep.verify(tmp_path / "fp8", show=False)["faults"] == []
