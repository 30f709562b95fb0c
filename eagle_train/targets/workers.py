"""Several extraction workers on this machine, started by one command."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from eagle_train import distributed
from eagle_train.targets.extract import summary_of
from eagle_train.targets.survey import Survey, default_processes, refuse_full_disk, survey


def start_workers(
    rows_dir: str | Path,
    target: str,
    out: str | Path,
    processes: int | None,
    settings: dict[str, Any],
    *,
    ignore_space: bool = False,
    max_bad_rows: int | None = None,
) -> dict[str, Any] | None:
    """Extract with `processes` workers (None: one a GPU, or one a core where memory allows).

    Everything that can be refused is refused here, once, before a worker starts. Returns the summary, or
    None when one process is enough: then call `extract`. Raises UserError when a worker fails.
    """
    work = survey(rows_dir, target, out, **settings)
    count = processes if processes is not None else default_processes(work, Path(out))
    if count == 1:
        return None
    if not ignore_space:
        refuse_full_disk(work, Path(out))
    print(f"{work.size_text()}; {count} workers", file=sys.stderr)
    code = distributed.relaunch(
        count, _arguments(work, str(rows_dir), target, str(out), settings, max_bad_rows)
    )
    if code == 130:
        raise KeyboardInterrupt
    return summary_of(Path(out))


def _arguments(
    work: Survey, rows_dir: str, target: str, out: str, settings: dict[str, Any], max_bad_rows: int | None
) -> list[str]:
    """The command line of one worker, with everything that has a default on this machine spelt out."""
    setting = work.plan.setting
    arguments = ["extract", rows_dir, "--target", target, "--out", out, "--worker", "--ignore-space"]
    arguments += ["--for", setting.features, "--codec", setting.codec, "--dtype", setting.target["dtype"]]
    arguments += ["--device", setting.device, "--threads", str(setting.threads)]
    arguments += ["--batch-tokens", str(setting.batch_tokens), "--shard-tokens", str(setting.shard_tokens)]
    if setting.layer_ids:
        arguments += ["--layers", ",".join(map(str, setting.layer_ids))]
    if max_bad_rows is not None:
        arguments += ["--max-bad-rows", str(max_bad_rows)]
    if settings.get("trust_remote_code"):
        arguments.append("--trust-remote-code")
    return arguments
