"""Where this process stands among others, and how one command starts several.

Ranks come from the variables that torchrun and accelerate set; without them there is one process.
"""

from __future__ import annotations

import os
import subprocess
import sys

from eagle_train.errors import UserError

_RELAUNCHED = "EAGLE_RELAUNCHED"  # the number that --processes gave
# Seconds from a signal until torchrun kills: 30 by itself, too few for a large step and its checkpoint.
_GRACE = "TORCH_ELASTIC_SHUTDOWN_TIMEOUT"


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
    """Return the number of processes where `relaunch` started this one, else None."""
    number = os.environ.get(_RELAUNCHED, "")
    return int(number) if launched() and number.isdecimal() else None


def num_cores() -> int:
    """Return the number of cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def relaunch(processes: int, arguments: list[str]) -> None:
    """Run ``eagle ARGUMENTS`` in `processes` processes on this machine through torchrun.

    Returns when all of them ended well; an interruption ends them first. Raises UserError when one failed,
    whatever it failed of (it has said so itself), or when already inside such a launch.
    """
    if launched():
        raise UserError("--processes was given inside torchrun; use one of the two")
    if processes < 1:
        raise UserError(f"--processes {processes}: wanted 1 or more")
    command = [
        sys.executable,
        "-m",
        "eagle_train.launcher",
        "--standalone",
        f"--nproc-per-node={processes}",
        "--no-python",
        sys.executable,
        "-m",
        "eagle_cli.main",
        *arguments,
    ]
    environment = dict(os.environ)
    environment.setdefault("OMP_NUM_THREADS", str(max(1, num_cores() // processes)))
    environment.setdefault(_GRACE, "600")
    environment[_RELAUNCHED] = str(processes)
    child = subprocess.Popen(command, env=environment)
    try:
        code = child.wait()
    except KeyboardInterrupt:
        child.terminate()
        child.wait()
        raise
    if code != 0:
        raise UserError(
            f"one of the {processes} processes failed (its message is above); nothing finished is lost"
        )
