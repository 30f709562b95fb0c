"""Training on shards that pass by: its first epoch cut into shards, and the process that makes them."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from eagle_train.config import Recipe
from eagle_train.data.rows import open_rows
from eagle_train.errors import UserError
from eagle_train.io.whole_file import sweep
from eagle_train.progress import bytes_text
from eagle_train.shards.claims import clear
from eagle_train.shards.passing import Passage, PassingShards, groups_of
from eagle_train.shards.plan import RowTable, make_plan
from eagle_train.shards.schema import PLAN, Plan, shard_name
from eagle_train.targets.produce import READY, Job
from eagle_train.targets.survey import Survey, survey
from eagle_train.training.held_out import order_of, rows_of
from eagle_train.training.processes import Processes

if TYPE_CHECKING:
    from eagle_train.training.source import LiveTarget

_FEWEST = 4  # shards that pass by and fit at once, where steps are small enough
_OF_A_LAUNCH = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")
_WAIT = 10.0  # seconds until a process that does not end is killed


def open_passing(
    place: Path,
    recipe: Recipe,
    processes: Processes,
    dtype: torch.dtype,
    live: LiveTarget,
    folder: Path,
    done: int,
) -> PassingShards:
    """Let shards of the prepared rows in `place` pass by in `folder`, from after `done` steps on.

    The main process starts the one that makes them. Raises UserError where the run would read a row twice, or
    live.max_disk bytes are too few.
    """
    assert live.max_disk is not None
    rows = open_rows(place)
    table = RowTable.of(rows.dataset)
    train_rows, held_out, _ = rows_of(table, recipe, place)
    order = order_of(recipe, train_rows, table.lengths)
    steps = [window_rows for window_rows, _ in order.epoch(0)]
    num_steps = order.num_steps(recipe.run.epochs, recipe.run.steps, recipe.run.tokens)
    if num_steps is None or num_steps > len(steps):
        asked = "no number of steps" if num_steps is None else f"{num_steps:,} steps"
        raise UserError(
            f"--max-disk: recipe {recipe.name} asks for {asked}, one epoch of these rows has {len(steps):,}, "
            "and features pass by once; give --set run.epochs=1, or train with --online, which computes them "
            "in every epoch"
        )
    maker = None
    if processes.is_main:
        maker = _begin(place, recipe, processes, live, folder, steps, held_out, done, num_steps)
    processes.wait()
    passage = Passage.of(Plan.load(folder), steps, held_out)
    calls = {"check": maker.check, "stop": maker.stop} if maker is not None else {}
    return PassingShards(
        folder,
        passage,
        table,
        rows.info["supervised_frequencies"],
        max_disk=live.max_disk,
        rank=processes.rank,
        world=processes.world,
        dtype=dtype,
        **calls,
    )


def _begin(
    place: Path,
    recipe: Recipe,
    processes: Processes,
    live: LiveTarget,
    folder: Path,
    steps: list[tuple[int, ...]],
    held_out: list[int],
    done: int,
    num_steps: int,
) -> Maker:
    """Plan, remove what is used up, and start making what is missing.

    Where nothing is, the process is started all the same: it alone knows whether the target is still the one
    whose features lie there.
    """
    assert live.max_disk is not None
    known = Plan.load(folder) if (folder / PLAN).is_file() else None
    settings = live.settings(recipe, processes.device)
    settings |= {"codec": live.codec, "label_top_k": live.label_top_k}
    work = survey(place, live.name, folder, **settings)
    setting = work.plan.setting
    if known is None:
        setting = replace(setting, shard_tokens=_shard_tokens(work, held_out, live.max_disk))
    groups = groups_of(steps, held_out, work.table, setting.shard_tokens)
    plan = make_plan(work.table, setting, groups)
    if known is not None and known.shards != plan.shards:
        raise UserError(
            f"{folder}: shards of another order of rows (run.seed, data.held_out, what a step sees); give "
            "the same settings, choose another --out, or delete this folder"
        )
    passage = Passage.of(plan, steps, held_out)
    least = passage.least_room(work.table, work.target_bytes)
    if live.max_disk < least:
        raise UserError(
            f"--max-disk {bytes_text(live.max_disk)}: too little for the target's embedding and lm_head, the "
            f"held-out rows and one step's rows at once; give {bytes_text(1.1 * least)} or more, or a "
            "smaller --codec, data.held_out or data.tokens_per_step"
        )
    for number in passage.used_up(done):
        (folder / shard_name(number)).unlink(missing_ok=True)
    make = passage.wanted(done, num_steps)
    settings |= {"batch_tokens": setting.batch_tokens, "shard_tokens": setting.shard_tokens}
    settings |= {"threads": setting.threads, "dtype": setting.target["dtype"]}
    rows = [list(group) for group in groups]
    job = Job(str(place), live.name, str(folder), settings, rows, make, list(passage.stay), live.max_disk)
    return Maker(job)


def _shard_tokens(work: Survey, held_out: list[int], max_disk: int) -> int:
    """Return tokens of a shard such that several fit into what the held-out rows leave."""
    per_token = work.plan.size / work.plan.tokens
    room = max_disk - work.target_bytes - per_token * float(work.table.lengths[held_out].sum())
    return max(1, min(work.plan.setting.shard_tokens, int(room / _FEWEST / per_token)))


class Maker:
    """The process that makes shards, from when it is ready until `stop`; it never outlives this one."""

    def __init__(self, job: Job) -> None:
        self.folder = Path(job.folder)
        self.child = subprocess.Popen(
            [sys.executable, "-m", "eagle_train.targets.produce"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,  # Ctrl-C is for this process, which may still want some shards
            env={name: value for name, value in os.environ.items() if name not in _OF_A_LAUNCH},
        )
        assert self.child.stdin is not None
        assert self.child.stdout is not None
        try:
            self.child.stdin.write(json.dumps(asdict(job)) + "\n")
            self.child.stdin.flush()
            answer = self.child.stdout.readline()
            if answer.strip() != READY:
                self._raise(answer)
        except BaseException:
            self.stop()
            raise

    def check(self) -> None:
        """Raise UserError where it has failed."""
        if self.child.poll():
            self._raise("")

    def stop(self) -> None:
        """End it, and clear away what it was at."""
        with contextlib.suppress(OSError):
            self.child.stdin.close()  # type: ignore[union-attr]
        self.child.terminate()
        try:
            self.child.wait(_WAIT)
        except subprocess.TimeoutExpired:
            self.child.kill()
            self.child.wait()
        sweep(self.folder)
        clear(self.folder)

    def _raise(self, answer: str) -> Any:
        words = (answer + (self.child.stdout.read() if self.child.stdout is not None else "")).strip()
        code = self.child.wait()
        if code == 2 and words:
            raise UserError(words)
        raise UserError(
            f"{self.folder}: the process that makes shards ended with exit code {code} (its message is "
            "above); the same command again goes on"
        )
