"""Memory of this machine, the container's limit included."""

from __future__ import annotations

from pathlib import Path

_UNKNOWN = 8 << 30  # assumed where the system does not say
# limit, usage and the name of the reclaimable file cache in memory.stat, for both kinds of cgroups
_CGROUPS = (
    ("sys/fs/cgroup", "memory.max", "memory.current", "inactive_file"),
    ("sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
)


def total_memory(root: Path = Path("/")) -> int:
    """Return the bytes that this machine or container has."""
    return min([_meminfo(root, "MemTotal"), *(limit for limit, _ in _limits(root))])


def free_memory(root: Path = Path("/")) -> int:
    """Return the bytes that can be used now without swapping; cached files make room when asked to."""
    return min([_meminfo(root, "MemAvailable"), *(limit - used for limit, used in _limits(root))])


def _meminfo(root: Path, name: str) -> int:
    for line in _read(root / "proc/meminfo").splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    return _UNKNOWN


def _limits(root: Path) -> list[tuple[int, int]]:
    """Return (limit, bytes in use that cannot be reclaimed at once) of each cgroup with a limit."""
    found = []
    for folder, limit_name, usage_name, cache_name in _CGROUPS:
        limit, usage = (_read(root / folder / name).strip() for name in (limit_name, usage_name))
        if not (limit.isdigit() and usage.isdigit()):
            continue  # none, or "max"
        lines = _read(root / folder / "memory.stat").splitlines()
        cache = sum(int(line.split()[1]) for line in lines if line.split()[0] == cache_name)
        found.append((int(limit), max(0, int(usage) - cache)))
    return found


def _read(file: Path) -> str:
    try:
        return file.read_text()
    except OSError:
        return ""
