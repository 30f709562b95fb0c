"""What extraction and training will take, before any of it is done: bytes, memory, hours.

Bytes and memory follow from the rows, the target's config and the recipe. Hours come from a calibration
on this machine: the target's own batches for some seconds, then the recipe's own training on what they
left. Other work on the machine makes the clock run on while this process waits for a core, so its processor
time is measured beside it: the hours are told as the machine is now, and as they would be were it free.
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from eagle_train.config import Recipe
from eagle_train.errors import UserError
from eagle_train.heads.disk import build_head
from eagle_train.progress import span
from eagle_train.shards.codecs import CODECS, encode
from eagle_train.shards.manifest import close_directory
from eagle_train.shards.sampler import Plan as Order
from eagle_train.shards.schema import Plan, PlannedShard, holds_all_last
from eagle_train.shards.writer import ShardBuffer
from eagle_train.targets.batch import BatchFeatures, RowBatch, load_batch, run_batch, store_batch
from eagle_train.targets.capture import FeatureTap
from eagle_train.targets.check import check_start
from eagle_train.targets.checkpoint import plain_config, quantisation
from eagle_train.targets.labels import labels, top_labels
from eagle_train.targets.load import Target, load_target
from eagle_train.targets.survey import Survey, default_processes, survey
from eagle_train.training.build import config_on
from eagle_train.training.held_out import split
from eagle_train.training.loop import train
from eagle_train.training.metrics import read_metrics
from eagle_train.training.optim import is_matrix

_MOST_KEPT = 65_536  # tokens of the calibration that training is tried on


def estimate(
    rows_dir: str | Path,
    target: str,
    recipe: Recipe,
    *,
    codec: str = "bf16",
    label_top_k: int = 0,
    dtype: str = "auto",
    device: str | None = None,
    processes: int | None = None,
    seconds: float = 10.0,
    trust_remote_code: bool = False,
    show: bool = True,
) -> dict[str, Any]:
    """Return tokens, shards, ``bytes`` by codec, ``memory`` and ``hours`` for extraction and training.

    `seconds` of each are tried out; 0 leaves the hours out and loads no weights. ``hours`` are by the clock,
    as busy as the machine is now; ``share_of_a_core`` is what this process got of the core that it asked for,
    and ``hours_if_free`` what remains where it gets all of it. `processes` is the number
    of extraction workers, by default as `eagle extract` would start; training is one process. Memory is in
    bytes on one device, activations left out. Raises UserError as extraction and training do.
    """
    if seconds < 0:
        raise UserError(f"--seconds {seconds:g}: wanted 0 or more")
    kind = recipe.head.kind
    settings: dict[str, Any] = {"codec": codec, "label_top_k": label_top_k, "dtype": dtype, "device": device}
    settings["layer_ids"] = (recipe.head.layer_ids or None) if kind == "eagle3" else None
    work = survey(rows_dir, target, None, features=kind, trust_remote_code=trust_remote_code, **settings)
    setting = work.plan.setting
    workers = processes or default_processes(work, None)
    train_tokens = _train_tokens(work, recipe)
    found: dict[str, Any] = {
        "rows": work.plan.num_rows,
        "tokens": work.plan.tokens,
        "labels": work.plan.labels,
        "shards": len(work.plan.shards),
        "codec": codec,
        "label_top_k": label_top_k or None,
        "features": kind,
        "layer_ids": list(setting.layer_ids),
        "bytes": {name: work.directory_size(name) for name in CODECS},
        "memory": _memory(work, recipe),
        "workers": workers,
        "device": setting.device,
        "dtype": setting.target["dtype"],
        "quantisation": quantisation(work.config),
        "train_tokens": train_tokens,
        "train_minutes_at_most": recipe.run.minutes,
        "hours": None,
        "hours_if_free": None,
        "share_of_a_core": None,
    }
    if seconds == 0:
        return found
    with tempfile.TemporaryDirectory(prefix="eagle-plan-") as temporary:
        folder = Path(temporary)
        _say(f"trying extraction for about {span(seconds)}, after the target is loaded and checked", show)
        extracted, checked, got = _try_extraction(work, target, folder / "shards", seconds, trust_remote_code)
        most = max(1, int(extracted * seconds))
        _say(f"extraction: {extracted:,.0f} tokens/s; trying training for about {span(seconds)}", show)
        trained, had = _try_training(folder, recipe, seconds, most)
    extract = (work.plan.tokens / extracted / workers + checked) / 3600
    return {
        **found,
        "extract_tokens_per_second_of_a_worker": extracted,
        "train_tokens_per_second": trained,
        "hours": {"extract": extract, "train": _train_hours(recipe, train_tokens, trained)},
        "hours_if_free": {
            "extract": extract * got,
            "train": _train_hours(recipe, train_tokens, trained / had),
        },
        "share_of_a_core": {"extract": got, "train": had},
    }


def _say(text: str, show: bool) -> None:
    if show:
        print(f"plan: {text}", file=sys.stderr, flush=True)


def _train_hours(recipe: Recipe, tokens: int | None, rate: float) -> float:
    """Return the hours of so many tokens at a rate a second, or of the recipe's clock where it ends first."""
    minutes = recipe.run.minutes
    ends = (None if tokens is None else tokens / rate / 3600, minutes and minutes / 60)
    return min(hours for hours in ends if hours is not None)


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


def _train_tokens(work: Survey, recipe: Recipe) -> int | None:
    """Return the tokens that the recipe trains on, None when its clock alone ends it."""
    run, data = recipe.run, recipe.data
    if run.tokens is not None:
        return run.tokens
    rows = split(work.table.conversation_ids, data.held_out)[0]
    lengths = tuple(int(length) for length in work.table.lengths[rows])
    if run.epochs is not None:
        return run.epochs * sum(lengths)
    if run.steps is None:
        return None
    order = Order(tuple(rows), lengths, run.seed, data.tokens_per_step, data.rows_per_step)
    return sum(window.tokens for window, _ in zip(order.windows(), range(run.steps), strict=False))


def _memory(work: Survey, recipe: Recipe) -> dict[str, int]:
    setting, text = work.plan.setting, plain_config(work.config.get_text_config())
    config = config_on(
        recipe, text, setting.vocab_size, setting.layer_ids, str(work.plan.setting.target["name"])
    )
    ids = torch.arange(config.draft_vocab_size, device="meta") if config.reduced_vocabulary else None
    with torch.device("meta"):
        weights = dict(build_head(config, ids).named_parameters())
    trained = sum(weight.numel() * _bytes_a_weight(name, weight, recipe) for name, weight in weights.items())
    return {
        "target": work.weights_bytes,
        "head_parameters": sum(weight.numel() for weight in weights.values()),
        "training": trained + work.target_bytes,
    }


def _bytes_a_weight(name: str, weight: nn.Parameter, recipe: Recipe) -> int:
    """Weight, gradient and what the optimizer keeps, all in float32: two moments, or one for Muon."""
    by_muon = recipe.optim.name == "muon" and is_matrix(name, weight)
    return 4 * (2 + (1 if by_muon else 2) + (recipe.optim.ema > 0))


def _try_extraction(
    work: Survey, name: str, folder: Path, seconds: float, trust_remote_code: bool
) -> tuple[float, float, float]:
    """Run batches spread over the plan and leave shards of them in `folder`.

    Returns tokens a second, the seconds of the check that every extraction starts with, and the share of a
    core that this process had.
    """
    setting, (first, *others) = work.plan.setting, _spread(work)
    before = torch.get_num_threads()
    if work.device.type == "cpu":
        torch.set_num_threads(setting.threads)
    target = load_target(name, dtype=work.dtype, device=work.device, trust_remote_code=trust_remote_code)
    done, kept, spent = 0, 0, Stopwatch()
    with FeatureTap(target, setting.layer_ids) as tap:
        with (warming := Stopwatch()):
            sample = [_run(work, tap, first)]  # warms up
        begun = time.perf_counter()
        check_start(tap, *sample[0], work.table, setting)
        checked = time.perf_counter() - begun
        if warming.wall >= seconds:  # one slow batch is enough to time by
            spent, others, done = warming, [], len(sample[0][0].real)
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
    return done / spent.wall, checked, spent.share(work.device.type)


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
        torch.cuda.synchronize()
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
    if target.device.type == "cuda":
        torch.cuda.synchronize()
    target.frozen().save(folder)
    buffer.finish(folder, most_bad=len(shard.rows))
    close_directory(folder, plan)


def _try_training(folder: Path, recipe: Recipe, seconds: float, most: int) -> tuple[float, float]:
    """Train on the sample for some seconds, as the recipe says, in steps of `most` tokens at most.

    A step always ends: one of 65,536 tokens would run for minutes on a CPU, whatever `seconds` say.
    Returns tokens a second after a warm-up, and the share of a core that this process had.
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
    short = replace(recipe, run=run, data=data)
    with Stopwatch() as spent:
        made = train(folder / "shards", short, folder / "run", show=False)
    share = spent.share(made["device"])
    lines = [line for line in read_metrics(folder / "run") if line["step"] > 0]
    first, last = lines[min(1, len(lines) - 2)] if len(lines) > 1 else None, lines[-1]
    if first is None:  # one step alone took the whole time
        return last["tokens"] / max(last["seconds"], 1e-9), share
    return (last["tokens"] - first["tokens"]) / max(last["seconds"] - first["seconds"], 1e-9), share
