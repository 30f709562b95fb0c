"""A directory of shards to change, and ways to change it."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture
def copied(tmp_path: Path, tiny_shards_dir: Path) -> Path:
    return Path(shutil.copytree(tiny_shards_dir, tmp_path / "copy"))


def edit(file: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Let `change` change a JSON record."""
    record = json.loads(file.read_text())
    change(record)
    file.write_text(json.dumps(record))


def flip(file: Path) -> None:
    """Flip a bit of the last tensor."""
    content = bytearray(file.read_bytes())
    content[-5] ^= 8
    file.write_bytes(content)


def bytes_of(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in sorted(folder.iterdir())}
