"""Memory as the system and the container say it."""

from __future__ import annotations

from pathlib import Path

import pytest

from eagle_train.targets.memory import free_memory, total_memory

GIB = 1 << 30


def _machine(root: Path, total: int, available: int) -> Path:
    (root / "proc").mkdir()
    lines = [("MemTotal", total), ("MemFree", available // 3), ("MemAvailable", available)]
    (root / "proc/meminfo").write_text("".join(f"{name}:  {size // 1024} kB\n" for name, size in lines))
    return root


def _container(root: Path, version: int, limit: str, usage: int, cache: int) -> None:
    folder = root / ("sys/fs/cgroup" if version == 2 else "sys/fs/cgroup/memory")
    folder.mkdir(parents=True)
    names = (
        ("memory.max", "memory.current")
        if version == 2
        else ("memory.limit_in_bytes", "memory.usage_in_bytes")
    )
    prefix = "" if version == 2 else "total_"
    (folder / names[0]).write_text(f"{limit}\n")
    (folder / names[1]).write_text(f"{usage}\n")
    (folder / "memory.stat").write_text(f"anon 5\n{prefix}active_file 7\n{prefix}inactive_file {cache}\n")


def test_a_machine_without_a_container(tmp_path: Path) -> None:
    root = _machine(tmp_path, 64 * GIB, 40 * GIB)
    assert (total_memory(root), free_memory(root)) == (64 * GIB, 40 * GIB)


@pytest.mark.parametrize("version", [1, 2])
def test_cached_files_do_not_count_as_used_in_a_container(tmp_path: Path, version: int) -> None:
    root = _machine(tmp_path, 64 * GIB, 40 * GIB)
    _container(root, version, str(16 * GIB), usage=15 * GIB, cache=11 * GIB)
    assert (total_memory(root), free_memory(root)) == (16 * GIB, 12 * GIB)


@pytest.mark.parametrize(("version", "limit"), [(2, "max"), (1, str(2**63 - 4096))])
def test_a_container_without_a_limit_is_the_machine(tmp_path: Path, version: int, limit: str) -> None:
    root = _machine(tmp_path, 64 * GIB, 40 * GIB)
    _container(root, version, limit, usage=15 * GIB, cache=0)
    assert (total_memory(root), free_memory(root)) == (64 * GIB, 40 * GIB)


def test_a_system_that_does_not_say_is_taken_for_a_small_one(tmp_path: Path) -> None:
    assert total_memory(tmp_path) == free_memory(tmp_path) == 8 * GIB
