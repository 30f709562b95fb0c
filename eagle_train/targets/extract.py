"""Extraction: every planned shard once, by whichever worker takes it.

Workers never talk to each other: each takes the next shard that nobody has (claims.py) until all are
there. Writing runs in a thread of its own beside the next shard's forwards.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch

from eagle_train import distributed
from eagle_train.errors import UserError
from eagle_train.io.paths import make_folder
from eagle_train.io.whole_file import sweep
from eagle_train.progress import counted, progress
from eagle_train.shards.claims import CLOSING, Claims, clear, take_in_turn
from eagle_train.shards.frozen_target import target_bytes
from eagle_train.shards.listing import find_manifest
from eagle_train.shards.manifest import close_directory
from eagle_train.shards.schema import INDEX, MANIFEST, Plan, shard_name
from eagle_train.shards.writer import ShardBuffer, finished_shard, shard_fault
from eagle_train.targets.batch import load_batch, memory_explained, run_batch, store_batch
from eagle_train.targets.capture import FeatureTap
from eagle_train.targets.check import check_start
from eagle_train.targets.load import Target, load_target, on
from eagle_train.targets.peers import Peers
from eagle_train.targets.settle import settle
from eagle_train.targets.survey import Survey, refuse_full_disk, survey
from eagle_train.targets.tensor_parallel import Group

_SECONDS_BETWEEN_LOOKS = 0.5


def extract(
    rows_dir: str | Path,
    target: str | Path,
    out: str | Path,
    *,
    features: str = "eagle3",
    codec: str = "bf16",
    label_top_k: int = 0,
    dtype: str | torch.dtype = "auto",
    layer_ids: Sequence[int] | None = None,
    batch_tokens: int | None = None,
    shard_tokens: int | None = None,
    threads: int | None = None,
    device: str | torch.device | None = None,
    device_map: str | dict[str, Any] | None = None,
    group: Group | None = None,
    trust_remote_code: bool = False,
    ignore_disk: bool = False,
    max_bad_rows: int | None = None,
    show: bool = True,
    announce: bool = True,
) -> dict[str, Any]:
    """Run the frozen target over prepared rows and write its features as shards into `out`.

    Any number of processes, on any machines that share the folder, may run it at once and share the
    work; each returns when all shards are there. What is finished already is kept. `label_top_k` above 0
    stores so many likeliest tokens of each label in place of its state (``--for eagle3`` alone). With the
    `group` of `tensor_parallel.joined`, whose processes hold one model together, its first one calls this.
    Returns rows, tokens, bytes, shards done here and the share of time spent waiting for the disk. Raises
    UserError for anything the user must change; the same call again goes on where it stopped.
    """
    folder = Path(out)
    work = survey(
        rows_dir,
        str(target),
        folder,
        features=features,
        codec=codec,
        label_top_k=label_top_k,
        dtype=dtype,
        layer_ids=layer_ids,
        batch_tokens=batch_tokens,
        shard_tokens=shard_tokens,
        threads=threads,
        device=device,
        trust_remote_code=trust_remote_code,
        tensor_parallel=0 if group is None else group.size,
    )
    if not ignore_disk:
        refuse_full_disk(work, folder)
    if announce and show and distributed.is_main():
        print(work.size_text(), file=sys.stderr)
        if work.device.type == "cpu":
            batch = min(work.plan.setting.batch_tokens, work.plan.tokens)
            print(
                f"extract: shows what is done after each batch of up to {counted(batch, 'token')} (which may "
                "take minutes), and keeps it after each shard; a smaller --batch-tokens does both oftener",
                file=sys.stderr,
            )
    make_folder(folder)
    with fixed_threads(work), on(work.device):
        own_code: dict[str, Any] = {"dtype": work.dtype, "trust_remote_code": trust_remote_code}
        if group is not None:
            model = group.load(str(target), threads=work.plan.setting.threads, **own_code)
        else:
            model = load_target(target, device=work.device, device_map=device_map, **own_code)
        plan = settle(work, model, folder)
        limit = max(1, plan.num_rows // 100) if max_bad_rows is None else max_bad_rows
        started, done, waited = time.monotonic(), list[int](), 0.0
        while True:
            made, spent, mended = _work(work, plan, model, folder, limit, show and distributed.is_main())
            done, waited = done + made, waited + spent
            if not (distributed.is_main() or mended) or _closed(folder, plan):
                break
    seconds = time.monotonic() - started
    share = waited / max(seconds, 1e-9)
    if done and show and distributed.is_main():
        print(f"extract: {share:.1%} of the time was spent waiting for the disk", file=sys.stderr)
    return {
        **summary_of(folder),
        "complete": True,
        "shards_done_here": len(done),
        "tokens_done_here": sum(plan.shards[number].tokens for number in done),
        "seconds": seconds,
        "share_of_time_waiting_for_the_disk": share,
    }


def summary_of(folder: Path) -> dict[str, Any]:
    """Return what an extraction directory holds: counts, bytes, and whether it is complete."""
    plan = Plan.load(folder)
    info = find_manifest(folder)
    made = plan.to_json() if info is None else info
    size = sum(shard["bytes"] for shard in made["shards"])
    return {
        "out": str(folder),
        "complete": info is not None,
        "features": plan.setting.features,
        "layer_ids": list(plan.setting.layer_ids),
        "codec": plan.setting.codec,
        "label_top_k": plan.setting.label_top_k or None,
        "label_mass": made.get("label_mass"),
        "rows": made["num_rows"],
        "skipped": len(made.get("skipped", [])),
        "tokens": made["tokens"],
        "labels": made["labels"],
        "shards": len(made["shards"]),
        "bytes": size,
        "target_bytes": target_bytes(folder),
    }


@contextmanager
def fixed_threads(work: Survey) -> Iterator[None]:
    """Sums on a CPU depend on the number of threads, so the plan fixes it."""
    before = torch.get_num_threads()
    if work.device.type == "cpu":
        torch.set_num_threads(work.plan.setting.threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _work(
    work: Survey, plan: Plan, target: Target, folder: Path, limit: int, show: bool
) -> tuple[list[int], float, bool]:
    """Take shards until all are there.

    Returns those made here, the seconds spent waiting for the disk, and whether a damaged one was removed.
    """
    with Claims(folder) as claims:
        finished, mended = _finished(plan, folder, claims)
        missing = [number for number, bad in enumerate(finished) if bad is None]
        if not missing:
            return [], 0.0, mended
        if distributed.is_main():  # which writes it again at the end
            _reopen(folder)
        skipped = sum(bad for bad in finished if bad is not None)
        done: list[int] = []
        waited = 0.0
        writing: Future[int] | None = None
        seen = Peers(folder, plan, missing)
        total = sum(plan.shards[number].tokens for number in missing)

        def is_there(number: int) -> bool:
            return finished_shard(folder, plan, number) is not None

        def waiting(count: int) -> None:
            if show:
                print(
                    f"extract: waiting for {counted(count, 'shard')} that other workers have begun",
                    file=sys.stderr,
                )

        def write(buffer: ShardBuffer, most_bad: int) -> int:
            bad = buffer.finish(folder, most_bad)
            claims.release(buffer.number)
            return bad

        with (
            FeatureTap(target, plan.setting.layer_ids) as tap,
            progress("extract", total, "tokens", show) as shown,
            ThreadPoolExecutor(1) as writer,
        ):
            for number in take_in_turn(claims, missing, is_there, waiting):
                sweep(folder, shard_name(number))
                seen.forget(number)
                check = not done and distributed.is_main()
                buffer = fill(
                    work, plan, tap, number, check, lambda tokens: shown.advance(tokens + seen.newly_done())
                )
                before = time.monotonic()
                skipped += writing.result() if writing is not None else 0
                waited += time.monotonic() - before
                writing = writer.submit(write, buffer, limit - skipped)
                done.append(number)
            before = time.monotonic()
            if writing is not None:
                writing.result()
            waited += time.monotonic() - before
            shown.advance(seen.newly_done(now=True))
    return done, waited, mended


def _finished(plan: Plan, folder: Path, claims: Claims) -> tuple[list[int | None], bool]:
    """Return how many rows each shard has skipped, None where it is still to be made.

    This worker's share of those that are there is verified, a damaged one named and removed: then also True.
    """
    found: list[int | None] = []
    mended, was_whole = False, (folder / MANIFEST).is_file()
    for number in range(len(plan.shards)):
        shard = finished_shard(folder, plan, number)
        mine = plan.setting.tensor_parallel or number % distributed.world_size() == distributed.rank()
        if mine and was_whole and not (folder / shard_name(number)).exists():
            print(f"extract: {folder / shard_name(number)}: missing: made anew", file=sys.stderr)
        if mine and shard_fault(folder, plan, number) is not None:
            shard = None
            if claims.take(number):  # nobody is writing it: look again, then remove it
                if (fault := shard_fault(folder, plan, number)) is not None:
                    print(f"extract: {fault}: made anew", file=sys.stderr)
                    (folder / shard_name(number)).unlink(missing_ok=True)
                    mended = True
                claims.release(number)
        found.append(None if shard is None else len(shard.header["skipped"]))
    return found, mended


def fill(
    work: Survey,
    plan: Plan,
    tap: FeatureTap,
    number: int,
    check: bool,
    advance: Callable[[int], None] = lambda tokens: None,
) -> ShardBuffer:
    """Run all batches of one shard; `check` compares the first with the model's own forward.

    `advance` is told the tokens of each batch.
    """
    buffer = ShardBuffer(plan, number, work.table)
    for rows in plan.shards[number].batches:
        batch = load_batch(work.dataset, work.table, rows, tap.target.vocab_size, tap.target.device)
        more = "more --tensor-parallel" if plan.setting.tensor_parallel else "--device-map auto"
        with memory_explained(batch, plan.setting, f"with another --out, or {more}"):
            features = run_batch(tap, batch)
            if check:
                check_start(tap, batch, features, work.table, plan.setting)
                check = False
            store_batch(tap, batch, features, buffer, plan.setting)
        advance(len(batch.real))
    return buffer


def _closed(folder: Path, plan: Plan) -> bool:
    """Write the manifest, one worker at a time, and clear away what killed ones left.

    Returns False when another worker has just found a shard damaged and removed it.
    """
    with Claims(folder) as claims:
        while not claims.take(CLOSING):
            time.sleep(_SECONDS_BETWEEN_LOOKS)
        sweep(folder)
        try:
            close_directory(folder, plan)
        except UserError:
            if all(finished_shard(folder, plan, number) for number in range(len(plan.shards))):
                raise
            return False
        clear(folder)
    return True


def _reopen(folder: Path) -> None:
    """Take away a manifest that no longer holds."""
    with suppress(OSError):
        for name in (MANIFEST, INDEX):
            (folder / name).unlink(missing_ok=True)
