"""An extraction to run again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from eagle_train.targets.extract import extract

from .small import Run


@pytest.fixture
def run(tiny_rows_dir: Path, tiny_target_dir: Path, tmp_path: Path) -> Run:
    """Extract the tiny rows into ``tmp_path / out`` in many small shards."""

    def call(
        out: str = "out", rows: Path = tiny_rows_dir, target: Path = tiny_target_dir, **more: Any
    ) -> Any:
        settings = {"batch_tokens": 256, "shard_tokens": 512, "dtype": "fp32", "device": "cpu", **more}
        return extract(rows, target, tmp_path / out, show=False, **settings)

    return call
