"""Processes that a command started, as the kernel shows them."""

from __future__ import annotations

import time
from pathlib import Path


def worker_of(parent: int, mark: bytes, where: str = "cmdline") -> int:
    """Wait for a process with `mark` in its command line, or environment (``where="environ"``).

    It runs below the launcher that `parent` started; return its process id.
    """
    deadline = time.monotonic() + 600
    while time.monotonic() < deadline:
        for launcher in _children(parent):
            for worker in _children(launcher):
                if mark in Path(f"/proc/{worker}/{where}").read_bytes():
                    return worker
        time.sleep(0.05)
    raise AssertionError("no such process appeared")


def _children(parent: int) -> list[int]:
    try:
        return [int(pid) for pid in Path(f"/proc/{parent}/task/{parent}/children").read_text().split()]
    except OSError:
        return []
