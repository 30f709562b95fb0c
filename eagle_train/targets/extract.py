"""Extraction: every planned shard once, by whichever worker it falls to.

Worker r of w takes the shards r, r + w, ... that are not finished yet. Workers never talk to each
other; the one that finds everything finished writes the manifest. Writing runs in a thread of its own
beside the next shard's forwards.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from eagle_train import distributed
from eagle_train.io import make_folder, read_json
from eagle_train.progress import Progress, progress
from eagle_train.shards import frozen_target
from eagle_train.shards.schema import INDEX, MANIFEST, PLAN, Plan, shard_name
from eagle_train.shards.writer import ShardBuffer, close_directory, finished_shard
from eagle_train.targets.batch import load_batch, run_batch, store_batch
from eagle_train.targets.capture import FeatureTap
from eagle_train.targets.check import check_start
from eagle_train.targets.load import Target, load_target
from eagle_train.targets.survey import Survey, bytes_text, refuse_full_disk, survey

_SECONDS_BETWEEN_LOOKS = 2.0


def extract(
    rows_dir: str | Path,
    target: str | Path,
    out: str | Path,
    *,
    features: str = "eagle3",
    codec: str = "bf16",
    dtype: str | torch.dtype = "auto",
    layer_ids: Sequence[int] | None = None,
    batch_tokens: int | None = None,
    shard_tokens: int | None = None,
    threads: int | None = None,
    device: str | torch.device | None = None,
    device_map: str | dict[str, Any] | None = None,
    trust_remote_code: bool = False,
    ignore_space: bool = False,
    max_bad_rows: int | None = None,
    show: bool = True,
    announce: bool = True,
) -> dict[str, Any]:
    """Run the frozen target over prepared rows and write its features as shards into `out`.

    Under torchrun each rank does its share; alone this process does all. What is finished already is
    kept. Returns rows, tokens, bytes, shards done here and ``complete``: whether all shards are there.
    Raises UserError for anything the user must change; the same call again goes on where it stopped.
    """
    folder = Path(out)
    work = survey(
        rows_dir,
        str(target),
        folder,
        features=features,
        codec=codec,
        dtype=dtype,
        layer_ids=layer_ids,
        batch_tokens=batch_tokens,
        shard_tokens=shard_tokens,
        threads=threads,
        device=device,
        trust_remote_code=trust_remote_code,
    )
    if not ignore_space:
        refuse_full_disk(work, folder)
    if announce and show and distributed.is_main():
        print(work.size_text(), file=sys.stderr)
    make_folder(folder)
    with _threads(work):
        model = load_target(
            target,
            dtype=work.dtype,
            device=work.device,
            trust_remote_code=trust_remote_code,
            device_map=device_map,
        )
        plan = _settle(work, model, folder)
        limit = max(1, plan.num_rows // 100) if max_bad_rows is None else max_bad_rows
        started = time.monotonic()
        done, waited = _work(work, plan, model, folder, limit, show and distributed.is_main())
    seconds = time.monotonic() - started
    complete = (folder / frozen_target.RECORD).is_file() and all(
        finished_shard(folder, plan, number) for number in range(len(plan.shards))
    )
    if complete:
        close_directory(folder, plan, work.rows_info)
    return {
        **summary_of(folder),
        "shards_done_here": len(done),
        "tokens_done_here": sum(plan.shards[number].tokens for number in done),
        "seconds": seconds,
        "share_of_time_waiting_for_the_disk": waited / max(seconds, 1e-9),
    }


def summary_of(folder: Path) -> dict[str, Any]:
    """Return what an extraction directory holds: counts, bytes, and whether it is complete."""
    plan = Plan.load(folder)
    complete = (folder / MANIFEST).is_file()
    made = read_json(folder / MANIFEST, "run eagle extract") if complete else plan.to_json()
    size = sum(shard["bytes"] for shard in made["shards"])
    return {
        "out": str(folder),
        "complete": complete,
        "features": plan.setting.features,
        "layer_ids": list(plan.setting.layer_ids),
        "codec": plan.setting.codec,
        "rows": made["num_rows"],
        "skipped": len(made.get("skipped", [])),
        "tokens": made["tokens"],
        "labels": made["labels"],
        "shards": len(made["shards"]),
        "bytes": size,
        "size": bytes_text(size),
    }


@contextmanager
def _threads(work: Survey) -> Iterator[None]:
    """Sums on a CPU depend on the number of threads, so the plan fixes it."""
    before = torch.get_num_threads()
    if work.device.type == "cpu":
        torch.set_num_threads(work.plan.setting.threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _settle(work: Survey, target: Target, folder: Path) -> Plan:
    """Complete the plan by the target's identity and write it, or find the same one there."""
    identity = target.identity()
    known = Plan.load(folder) if (folder / PLAN).is_file() else None
    if known is not None:  # the name and revision first given stay in the headers
        named = {"name": known.setting.target["name"], "revision": known.setting.target["revision"]}
        if known.setting.target["fingerprint"] == identity["fingerprint"]:
            identity.update(named)
    setting = replace(work.plan.setting, target=identity, vocab_size=target.vocab_size)
    if known is not None:
        known.setting.refuse_other(setting, folder)
    plan = replace(work.plan, setting=setting)
    if known is None:
        plan.save(folder)
    if distributed.is_main() and not (folder / frozen_target.RECORD).is_file():
        target.frozen().save(folder)
    return plan


def _work(
    work: Survey, plan: Plan, target: Target, folder: Path, limit: int, show: bool
) -> tuple[list[int], float]:
    """Make this worker's unfinished shards; return them and the seconds spent waiting for the disk."""
    rank, count = distributed.rank(), distributed.world_size()
    finished = [finished_shard(folder, plan, number) for number in range(len(plan.shards))]
    todo = [number for number, shard in enumerate(finished) if shard is None]
    if not todo:
        return [], 0.0
    skipped = sum(len(shard.header["skipped"]) for shard in finished if shard is not None)
    _reopen(folder, todo)
    mine = [number for number in todo if number % count == rank]
    waited = 0.0
    writing: Future[int] | None = None
    seen = _Others(folder, plan, [number for number in todo if number not in mine])
    total = sum(plan.shards[number].tokens for number in todo)
    with (
        FeatureTap(target, plan.setting.layer_ids) as tap,
        progress("extract", total, "tokens", show) as shown,
        ThreadPoolExecutor(1) as writer,
    ):
        for number in mine:
            buffer = _fill(work, plan, tap, number, number == mine[0] and rank == 0, shown, seen)
            if target.device.type == "cuda":
                torch.cuda.synchronize()
            before = time.monotonic()
            skipped += writing.result() if writing is not None else 0
            waited += time.monotonic() - before
            writing = writer.submit(buffer.finish, folder, limit - skipped)
        before = time.monotonic()
        if writing is not None:
            writing.result()
        waited += time.monotonic() - before
        shown.advance(seen.newly_done(now=True))
    return mine, waited


def _fill(
    work: Survey, plan: Plan, tap: FeatureTap, number: int, check: bool, shown: Progress, seen: _Others
) -> ShardBuffer:
    """Run all batches of one shard."""
    buffer = ShardBuffer(plan, number, work.table)
    for rows in plan.shards[number].batches:
        batch = load_batch(work.dataset, work.table, rows, tap.target.vocab_size, tap.target.device)
        features = run_batch(tap, batch)
        if check:
            check_start(tap, batch, features, work.table, plan.setting)
            check = False
        store_batch(tap, batch, features, buffer, plan.setting)
        shown.advance(len(batch.real) + seen.newly_done())
    return buffer


class _Others:
    """Counts the tokens of shards that other workers finish meanwhile, for one progress bar over all."""

    def __init__(self, folder: Path, plan: Plan, numbers: list[int]) -> None:
        self._left = {folder / shard_name(n): plan.shards[n].tokens for n in numbers}
        self._looked = time.monotonic()

    def newly_done(self, now: bool = False) -> int:
        """Return the tokens finished by others since the last look; looks every two seconds, or `now`."""
        if not self._left or not (now or time.monotonic() - self._looked > _SECONDS_BETWEEN_LOOKS):
            return 0
        self._looked = time.monotonic()
        return sum(self._left.pop(path) for path in list(self._left) if path.exists())


def _reopen(folder: Path, todo: list[int]) -> None:
    """Take away a manifest that no longer holds, and what killed workers left half-written."""
    with suppress(OSError):
        for name in (MANIFEST, INDEX):
            (folder / name).unlink(missing_ok=True)
        mine = {shard_name(n) for n in todo if n % distributed.world_size() == distributed.rank()}
        for leftover in folder.glob(".shard-*.safetensors.*.tmp"):
            if leftover.name[1:].rsplit(".", 2)[0] in mine:
                leftover.unlink(missing_ok=True)
