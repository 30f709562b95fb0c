"""Shards recoded by scripts/bench_codecs.py are shards that training reads."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
import torch

from eagle_train.shards import upkeep
from eagle_train.shards.reader import open_shards
from eagle_train.targets.extract import extract


def test_recoded_shards_are_read_as_any_others(
    tmp_path: Path, tiny_shards_dir: Path, script: Callable[[str], ModuleType]
) -> None:
    errors = script("bench_codecs").recode(tiny_shards_dir, tmp_path / "fp8", "fp8")
    assert all(0 < one["error"] <= one["worst_token"] < 0.1 for one in errors["layers"].values())
    assert 0 < errors["labels"]["variation"] < 0.1
    true, stored = open_shards(tiny_shards_dir), open_shards(tmp_path / "fp8")
    assert stored.info["codec"] == "fp8"
    for i in range(true.num_rows):
        one, other = true.read(i), stored.read(i)
        assert torch.equal(one.input_ids, other.input_ids)
        assert one.label_last.shape == other.label_last.shape
        assert not torch.equal(one.label_last, other.label_last)
    assert upkeep.verify(tmp_path / "fp8", show=False)["faults"] == []


def test_recoded_top_labels_are_those_that_extraction_keeps(
    tmp_path: Path,
    tiny_shards_dir: Path,
    tiny_rows_dir: Path,
    tiny_target_dir: Path,
    script: Callable[[str], ModuleType],
) -> None:
    errors = script("bench_codecs").recode(tiny_shards_dir, tmp_path / "recoded", "bf16+top8")
    given = {"codec": "bf16", "label_top_k": 8, "dtype": "fp32", "device": "cpu", "batch_tokens": 512}
    extract(tiny_rows_dir, tiny_target_dir, tmp_path / "made", show=False, **given)  # type: ignore[arg-type]
    one, other = open_shards(tmp_path / "recoded"), open_shards(tmp_path / "made")
    assert one.info["label_mass"] == pytest.approx(other.info["label_mass"], abs=1e-3)
    for i in range(one.num_rows):
        first, second = one.read(i), other.read(i)
        assert first.label_logp is not None
        assert second.label_logp is not None
        torch.testing.assert_close(first.label_logp, second.label_logp, rtol=0, atol=0.01)
    assert 0 < errors["labels"]["variation"] <= errors["labels"]["bound"] < 1
    assert upkeep.verify(tmp_path / "recoded", show=False)["faults"] == []


def test_one_table_compares_sizes_errors_and_acceptance(
    tiny_shards_dir: Path, script: Callable[[str], ModuleType]
) -> None:
    module = script("bench_codecs")
    settings = ["run.steps=2", "run.precision=bf16"]
    found = dict(module.compare(tiny_shards_dir, ["bf16", "fp8+top4"], "eagle3-tiny", settings, True))
    head, _, *lines = module.table(found.items())
    assert [line.split(" | ")[0] for line in lines] == ["| bf16", "| fp8+top4"]
    assert all(line.count("|") == head.count("|") for line in lines)
    assert found["fp8+top4"]["bytes_per_token"] < 0.7 * found["bf16"]["bytes_per_token"]
    assert all(1 <= one["tau"] < 4 for one in found.values())
