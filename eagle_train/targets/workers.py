"""Several extraction workers on this machine, started by one command."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from eagle_train import distributed
from eagle_train.errors import UserError
from eagle_train.io.paths import make_folder
from eagle_train.launch import check_number, relaunch
from eagle_train.targets.extract import extract, summary_of
from eagle_train.targets.survey import Survey, default_processes, refuse_full_disk, survey
from eagle_train.targets.tensor_parallel import joined
from eagle_train.targets.tensor_parallel_options import check_devices, refuse_others


def start_workers(
    rows_dir: str | Path,
    target: str | Path,
    out: str | Path,
    *,
    processes: int | None = None,
    device_map: str | None = None,
    tensor_parallel: int | None = None,
    ignore_disk: bool = False,
    max_bad_rows: int | None = None,
    announce: bool = True,
    show: bool = True,
    **settings: Any,
) -> dict[str, Any]:
    """Extract with `processes` workers (None: one a GPU, or one a core where memory allows).

    One worker, a rank of torchrun and a model spread by `device_map` run in this process. With
    `tensor_parallel` so many processes hold one model together and are one worker: inside torchrun its ranks,
    of which all but the first return an empty record. `settings` are those of `extract`, whose record comes
    back otherwise. Everything that can be refused is refused here, once, before a worker starts. Raises
    UserError when a worker fails.
    """
    common: dict[str, Any] = {
        "ignore_disk": ignore_disk,
        "max_bad_rows": max_bad_rows,
        "announce": announce,
        "show": show,
    }
    if processes is not None:
        check_number(processes)
    if processes is not None and processes > 1 and device_map is not None:
        raise UserError(
            f"--processes {processes}: with --device-map {device_map} one process holds the whole model; "
            "leave one of the two out"
        )
    if tensor_parallel is not None:
        refuse_others(tensor_parallel, processes, device_map)
        device = check_devices(tensor_parallel, settings.get("device"))
        if distributed.launched():
            with joined(tensor_parallel, device) as group:
                if group.leads:
                    return extract(rows_dir, target, out, group=group, **common, **settings)
                group.follow()
                return {}
    if distributed.launched() or device_map is not None:
        return extract(rows_dir, target, out, device_map=device_map, **common, **settings)
    if processes is None and ":" in str(settings.get("device")):
        processes = 1  # one device of many was named
    work = survey(rows_dir, str(target), out, tensor_parallel=tensor_parallel or 0, **settings)
    count = tensor_parallel or (default_processes(work, Path(out)) if processes is None else processes)
    if count == 1:
        return extract(rows_dir, target, out, **common, **settings)
    if not ignore_disk:
        refuse_full_disk(work, Path(out))
    who = f"{count} processes with a part of the target each" if tensor_parallel else f"{count} workers"
    make_folder(out)  # here, so that a path that cannot be one is refused once
    print(f"{work.size_text()}; {who}", file=sys.stderr)
    relaunch(count, _arguments(work, str(rows_dir), str(target), str(out), settings, max_bad_rows))
    summary = summary_of(Path(out))
    if not summary["complete"]:
        raise UserError(f"{out}: the workers ended without a manifest; give the same command again")
    return summary


def _arguments(
    work: Survey, rows_dir: str, target: str, out: str, settings: dict[str, Any], max_bad_rows: int | None
) -> list[str]:
    """The command line of one worker, with everything that has a default on this machine spelt out."""
    setting = work.plan.setting
    arguments = ["extract", rows_dir, "--target", target, "--out", out, "--worker", "--ignore-disk"]
    arguments += ["--for", setting.features, "--codec", setting.codec, "--dtype", setting.target["dtype"]]
    device = str(settings.get("device") or setting.device)
    arguments += ["--device", device, "--threads", str(setting.threads)]
    arguments += ["--batch-tokens", str(setting.batch_tokens), "--shard-tokens", str(setting.shard_tokens)]
    if setting.tensor_parallel:
        arguments += ["--tensor-parallel", str(setting.tensor_parallel)]
    if setting.label_top_k:
        arguments += ["--label-top-k", str(setting.label_top_k)]
    if setting.layer_ids:
        arguments += ["--layers", ",".join(map(str, setting.layer_ids))]
    if max_bad_rows is not None:
        arguments += ["--max-bad-rows", str(max_bad_rows)]
    if settings.get("trust_remote_code"):
        arguments.append("--trust-remote-code")
    return arguments
