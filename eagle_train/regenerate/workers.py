"""Several answering workers on this machine, started by one command."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch

from eagle_train.errors import UserError
from eagle_train.launch import relaunch
from eagle_train.regenerate.output import read_report, report_of


def default_processes(device: str | None, device_map: str | None) -> int:
    """Return one process a visible GPU, and one where there is none or the model is spread over all."""
    if device_map is not None or (device or "cuda") != "cuda" or not torch.cuda.is_available():
        return 1
    return torch.cuda.device_count()


def start_workers(processes: int, arguments: list[str], out: Path) -> dict[str, Any]:
    """Run ``eagle ARGUMENTS`` in `processes` workers; return the report that the last of them wrote."""
    print(f"{processes} workers", file=sys.stderr)
    relaunch(processes, arguments)
    if not report_of(out).is_file():
        raise UserError(f"{out}: the workers ended without an output; give the same command again")
    return {**read_report(out, "give the same command again"), "reused": False}
