"""Trying extraction and training on this machine for some seconds each, for `estimate`.

Other work on the machine makes the clock run on while this process waits for a core, so its processor time is
measured beside it.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from eagle_train.config import Recipe
from eagle_train.shards.codecs import CODECS, encode
from eagle_train.shards.manifest import close_directory
from eagle_train.shards.schema import Plan, PlannedShard, holds_all_last
from eagle_train.shards.writer import ShardBuffer
from eagle_train.targets.batch import BatchFeatures, RowBatch, load_batch, run_batch, store_batch
from eagle_train.targets.capture import FeatureTap
from eagle_train.targets.check import check_start
from eagle_train.targets.labels import labels, top_labels
from eagle_train.targets.load import Target, load_target
from eagle_train.targets.survey import Survey
from eagle_train.training.interrupt import Interrupt
from eagle_train.training.loop import run_session
from eagle_train.training.metrics import read_metrics
from eagle_train.training.processes import join_processes
from eagle_train.training.session import Session, open_session

_MOST_KEPT = 65_536  # tokens of the calibration that training is tried on


class Stopwatch:
    """Seconds by the clock, and those in which this thread had a core."""

    def __init__(self) -> None:
        self.wall = self.own = 0.0

    def __enter__(self) -> Stopwatch:
        self._begun = time.perf_counter(), time.thread_time()
        return self

    def __exit__(self, *error: object) -> None:
        self.wall += time.perf_counter() - self._begun[0]
        self.own += time.thread_time() - self._begun[1]

    def share(self, device: str) -> float:
        """Return the share of a core that this thread had; 1 where another device did the work."""
        return min(1.0, max(self.own, 1e-9) / max(self.wall, 1e-9)) if device == "cpu" else 1.0


@dataclass(frozen=True)
class Tried:
    """What a stage takes on this machine, by the clock."""

    rate: float  # tokens a second once it is under way
    start: float  # seconds before and after: loading, checking, what the first batch takes longer
    share: float  # of a core that this process had; 1 where another device did the work
    evaluation: float = 0.0  # tokens a second of an evaluation
    saving: float = 0.0  # seconds of a checkpoint

    def seconds(self, tokens: float, evaluated: int = 0, saved: int = 0) -> float:
        """Return the seconds of the stage for so many tokens, and so many of evaluations and checkpoints."""
        more = evaluated / self.evaluation if evaluated else 0.0
        return self.start + tokens / self.rate + more + saved * self.saving


def try_extraction(work: Survey, name: str, folder: Path, seconds: float, trust_remote_code: bool) -> Tried:
    """Run batches spread over the plan for so long; leave a finished shard directory of them in `folder`."""
    setting, (first, *others) = work.plan.setting, _spread(work)
    before = torch.get_num_threads()
    if work.device.type == "cpu":
        torch.set_num_threads(setting.threads)
    done, kept = 0, 0
    spent, starting = Stopwatch(), Stopwatch()
    with starting:
        target = load_target(name, dtype=work.dtype, device=work.device, trust_remote_code=trust_remote_code)
        target.frozen().save(folder)  # with the fingerprint of all its weights
    with FeatureTap(target, setting.layer_ids) as tap:
        with (warming := Stopwatch()):
            sample = [_run(work, tap, first)]
        with starting:
            check_start(tap, *sample[0], work.table, setting)
        warm = len(sample[0][0].real)
        if warming.wall >= seconds:  # one slow batch is enough to time by
            spent, others, done = warming, [], warm
        for rows in others:
            with spent:
                batch, features = _run(work, tap, rows)
            done += len(batch.real)
            if kept < _MOST_KEPT:
                sample.append((batch, features))
                kept += len(batch.real)
            if spent.wall >= seconds:
                break
        _keep(work, target, tap, sample, folder)
    torch.set_num_threads(before)
    rate = done / spent.wall
    slower = max(0.0, warming.wall - warm / rate)
    return Tried(rate, starting.wall + slower, spent.share(work.device.type))


def _run(work: Survey, tap: FeatureTap, rows: Sequence[int]) -> tuple[RowBatch, BatchFeatures]:
    """Do with one batch what extraction does, save for writing, which runs beside it."""
    setting, target = work.plan.setting, tap.target
    batch = load_batch(work.dataset, work.table, rows, target.vocab_size, target.device)
    features = run_batch(tap, batch)
    last: Tensor | None = features.last if holds_all_last(setting.features) else features.label_last
    with torch.no_grad():
        if setting.label_top_k:
            top_labels(target, features.label_last, setting.label_top_k)
            last = None
        else:
            labels(target, features.label_last)
    for states, groups in ((features.aux, len(setting.layer_ids)), (last, 1)):
        if states is not None:
            encode(CODECS[setting.codec], states, groups)
    if target.device.type == "cuda":
        torch.cuda.synchronize(target.device)
    return batch, features


def _spread(work: Survey) -> list[tuple[int, ...]]:
    """Return all batches, in an order of which any beginning holds long and short rows in proportion.

    There are two at least: one to warm up with, one to time.
    """
    batches = [batch for shard in work.plan.shards for batch in shard.batches]
    batches.sort(key=lambda batch: -int(work.table.lengths[list(batch)].max()))
    golden = 0.6180339887498949
    order = sorted(range(len(batches)), key=lambda i: (i * golden) % 1.0)
    spread = [batches[i] for i in order]
    return spread if len(spread) > 1 else 2 * spread


def _keep(
    work: Survey,
    target: Target,
    tap: FeatureTap,
    sample: Sequence[tuple[RowBatch, BatchFeatures]],
    folder: Path,
) -> None:
    """Write the sample as a finished shard directory."""
    kept = {batch.rows: (batch, features) for batch, features in sample}
    tokens = sum(len(batch.real) for batch, _ in kept.values())
    positions = sum(len(batch.label_at) for batch, _ in kept.values())
    setting = replace(work.plan.setting, target=target.identity(), vocab_size=target.vocab_size)
    shard = PlannedShard(tuple(kept), tokens, positions, 0)
    plan = Plan(setting, sum(map(len, kept)), (shard,))
    buffer = ShardBuffer(plan, 0, work.table)
    for batch, features in kept.values():
        store_batch(tap, batch, features, buffer, setting)
    buffer.finish(folder, most_bad=len(shard.rows))
    close_directory(folder, plan)


def try_training(folder: Path, recipe: Recipe, seconds: float, most: int) -> Tried:
    """Train on the sample in `folder` for so long, as the recipe says, in steps of `most` tokens at most.

    A step always ends: one of 65,536 tokens would run for minutes on a CPU, whatever `seconds` say.
    """
    never = 1 << 40
    run = replace(
        recipe.run, epochs=None, steps=None, tokens=None, minutes=seconds / 60, log_every=1, patience=None
    )
    run = replace(run, eval_every=never, save_every=never)
    data = replace(recipe.data, held_out=0)
    if data.tokens_per_step is not None:
        step = min(data.tokens_per_step, most)
        data = replace(data, tokens_per_step=step, micro_tokens=min(data.micro_tokens, step))
    short, out = replace(recipe, run=run, data=data), folder.with_name("run")
    with (spent := Stopwatch()):
        session = open_session(join_processes(), folder, short, out)
        with closing(session.loader.source):
            made = run_session(session, show=False)
    evaluation = _evaluated(session, most // 4)
    session.state.step += 1  # a step without a checkpoint
    with (saving := Stopwatch()):
        session.save()
    lines = [line for line in read_metrics(out) if line["step"] > 0]
    first, last = lines[min(1, len(lines) - 2)] if len(lines) > 1 else None, lines[-1]
    if first is None:  # one step alone took the whole time
        rate = last["tokens"] / max(last["seconds"], 1e-9)
    else:
        rate = (last["tokens"] - first["tokens"]) / max(last["seconds"] - first["seconds"], 1e-9)
    start = spent.wall - last["tokens"] / rate
    return Tried(rate, max(0.0, start), spent.share(made["device"]), evaluation, saving.wall)


def _evaluated(session: Session, most: int) -> float:
    """Return tokens a second of an evaluation on the first rows, `most` tokens or one row of them."""
    lengths = session.loader.source.lengths
    rows = [row for row, end in enumerate(lengths.cumsum().tolist()) if end <= most] or [0]
    session.held_out = rows
    with (spent := Stopwatch()), Interrupt() as interrupt:
        session.evaluate(interrupt)
    return float(lengths[rows].sum()) / spent.wall
