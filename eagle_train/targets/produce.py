"""The process that makes shards which pass by, beside the one that trains on them and removes them.

It is started as ``python -m eagle_train.targets.produce``, reads one line of JSON, a `Job`, and says `READY`
once the plan is settled. It ends with its work, or with whoever holds the other end of its input.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from eagle_train.errors import UserError
from eagle_train.io.paths import make_folder
from eagle_train.io.whole_file import sweep
from eagle_train.progress import bytes_text
from eagle_train.shards.claims import CLOSING, Claims
from eagle_train.shards.plan import make_plan
from eagle_train.shards.schema import Plan, shard_name
from eagle_train.shards.sizes import file_size
from eagle_train.shards.writer import finished_shard, shard_fault
from eagle_train.targets.capture import FeatureTap
from eagle_train.targets.extract import fill, fixed_threads
from eagle_train.targets.load import Target, load_target, on
from eagle_train.targets.settle import settle
from eagle_train.targets.survey import Survey, survey

READY = "ready"
_LOOK = 0.05  # seconds between looks for room on the disk, or for an earlier process to end
_OFFSETS = 256  # bytes by which a shard's header may be longer: its tensors lie in an order of the library's


@dataclass(frozen=True)
class Job:
    """Which shards to make, of what, in which order, and the room they may take."""

    rows_dir: str
    target: str
    folder: str
    settings: dict[str, Any]  # of `survey`
    groups: list[list[int]]  # the rows of every shard of the plan
    make: list[int]  # shards in the order in which they are wanted
    stay: list[int]  # those among them that nobody removes
    max_disk: int  # bytes of all files in the folder at once


def produce(job: Job, ready: Callable[[], None]) -> None:
    """Make the job's shards, waiting before each until it fits. Raises UserError as extraction does.

    `ready` is called once the plan and the target's files are there and no damaged shard is. One process at
    a time makes shards in a folder. Rows whose features are not finite are kept.
    """
    folder = make_folder(job.folder)
    work = survey(job.rows_dir, job.target, folder, **job.settings)
    work = replace(work, plan=make_plan(work.table, work.plan.setting, job.groups))
    with fixed_threads(work), on(work.device), Claims(folder) as claims:
        while not claims.take(CLOSING):
            time.sleep(_LOOK)
        sweep(folder)
        model = load_target(
            job.target,
            dtype=work.dtype,
            device=work.device,
            trust_remote_code=bool(job.settings.get("trust_remote_code")),
        )
        plan = settle(work, model, folder)
        _keep_what_comes_first(job, plan, folder)
        ready()
        _make(job, work, plan, model, folder)


def _keep_what_comes_first(job: Job, plan: Plan, folder: Path) -> None:
    """Remove damaged shards, and of those that pass all that come after a missing one.

    Nobody reads these before the missing ones are made, for which they might leave no room.
    """
    gap = False
    for number in job.make:
        whole = (folder / shard_name(number)).is_file() and shard_fault(folder, plan, number) is None
        stays = number in job.stay
        if not whole or (gap and not stays):
            (folder / shard_name(number)).unlink(missing_ok=True)
        gap = gap or not (whole or stays)


def _make(job: Job, work: Survey, plan: Plan, model: Target, folder: Path) -> None:
    missing = [number for number in job.make if finished_shard(folder, plan, number) is None]
    writing: Future[int] | None = None
    with FeatureTap(model, plan.setting.layer_ids) as tap, ThreadPoolExecutor(1) as writer:
        for number in missing:
            buffer = fill(work, plan, tap, number, check=number == missing[0])
            if writing is not None:
                writing.result()
            _wait_for_room(job, file_size(plan, number, work.table) + _OFFSETS, folder)
            writing = writer.submit(buffer.finish, folder, None)
        if writing is not None:
            writing.result()


def _wait_for_room(job: Job, size: int, folder: Path) -> None:
    """Return when `size` bytes more stay below the limit; only this process writes here."""
    passing = [folder / shard_name(number) for number in set(job.make) - set(job.stay)]
    while bytes_in(folder) + size > job.max_disk:
        if not any(file.exists() for file in passing) and bytes_in(folder) + size > job.max_disk:
            raise UserError(
                f"{folder}: holds {bytes_text(bytes_in(folder))} that stay, the next shard takes "
                f"{bytes_text(size)}, --max-disk is {bytes_text(job.max_disk)}; give more"
            )
        time.sleep(_LOOK)


def bytes_in(folder: Path) -> int:
    """Return the bytes of all files in `folder` and below, those being written too."""
    total = 0
    for place, _, names in os.walk(folder):
        for name in names:
            with suppress(FileNotFoundError):  # removed just now
                total += os.stat(os.path.join(place, name)).st_size
    return total


def _end_with_the_other_side() -> None:
    while os.read(0, 1):  # not through sys.stdin, whose lock an ending interpreter wants
        pass
    os._exit(1)


def main() -> int:
    """Take a job from the input, do it, and return the exit code; a UserError goes to the output."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print is no answer
    job = Job(**json.loads(sys.stdin.buffer.readline()))
    threading.Thread(target=_end_with_the_other_side, daemon=True).start()
    try:
        produce(job, lambda: print(READY, file=answers, flush=True))
    except UserError as error:
        print(error, file=answers, flush=True)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
