"""A small extraction to run again, and what it leaves on disk."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

Run = Callable[..., dict[str, Any]]


def bytes_of(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in sorted(folder.iterdir())}


def flip_a_bit(file: Path) -> None:
    """Damage a file near its end, where a shard has a tensor."""
    content = bytearray(file.read_bytes())
    content[-9] ^= 1
    file.write_bytes(content)


def shards_in(folder: Path) -> list[str]:
    return sorted(file.name for file in folder.glob("shard-*.safetensors"))
