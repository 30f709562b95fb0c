"""Where this process stands among others.

Ranks come from the variables that torchrun and accelerate set; without them there is one process.
"""

from __future__ import annotations

import os

RELAUNCHED = "EAGLE_RELAUNCHED"  # the number that --processes gave


def rank() -> int:
    """Return this process's number among all, 0 when alone."""
    return int(os.environ.get("RANK", "0"))


def local_rank() -> int:
    """Return this process's number on its machine, 0 when alone."""
    return int(os.environ.get("LOCAL_RANK", "0"))


def world_size() -> int:
    """Return the number of processes, 1 when alone."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def local_world_size() -> int:
    """Return the number of processes on this machine, 1 when alone."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def is_main() -> bool:
    """Return True on the one process that prints and writes shared records."""
    return rank() == 0


def launched() -> bool:
    """Return True when torchrun (or the like) started this process."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def relaunched() -> int | None:
    """Return the number of processes where one command (launch.py) started this one, else None."""
    number = os.environ.get(RELAUNCHED, "")
    return int(number) if launched() and number.isdecimal() else None


def num_cores() -> int:
    """Return the number of cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
