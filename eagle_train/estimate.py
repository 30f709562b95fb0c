"""What extraction and training will take, before any of it is done: bytes, memory, hours.

Bytes and memory follow from the rows, the target's config and the recipe. Hours come from a calibration
on this machine (trial.py): the target's own batches for some seconds, then the recipe's own training on what
they left. They are told as busy as the machine is now, and as they would be were it free.
"""

from __future__ import annotations

import math
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from eagle_train.config import Recipe
from eagle_train.errors import UserError
from eagle_train.heads.disk import build_head
from eagle_train.progress import span
from eagle_train.shards.codecs import CODECS
from eagle_train.targets.checkpoint import plain_config
from eagle_train.targets.packed import quantisation
from eagle_train.targets.survey import Survey, default_processes, survey
from eagle_train.targets.tensor_parallel_options import refuse_others
from eagle_train.training.build import config_on
from eagle_train.training.held_out import order_of, rows_of
from eagle_train.training.optim import is_matrix
from eagle_train.trial import Stopwatch, Tried, try_extraction, try_training


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
    tensor_parallel: int | None = None,
    seconds: float | None = None,
    trust_remote_code: bool = False,
    show: bool = True,
) -> dict[str, Any]:
    """Return tokens, shards, ``bytes`` by codec, ``memory`` and ``hours`` for extraction and training.

    Of the bytes ``target_bytes`` are the target's embedding and lm_head.

    `seconds` of each are tried out, 10 if None; 0 leaves the hours out and loads no weights. With
    `tensor_parallel` so many processes hold the target together: its memory is that of one of them, and
    nothing can be tried in this one process. ``hours`` are by the clock,
    as busy as the machine is now, with evaluations, checkpoints and what comes before and after
    (``start_seconds``), but for the interpreter's start; ``share_of_a_core`` is what this process got of the
    core that it asked for, and ``hours_if_free`` what remains where it gets all of it. `processes` is the
    number of extraction workers, by default as `eagle extract` would start; training is one process. Memory
    is in bytes on one device, activations left out. Raises UserError as extraction and training do.
    """
    if tensor_parallel is not None:
        refuse_others(tensor_parallel, processes, None)
        if seconds:
            raise UserError(
                f"--seconds {seconds:g}: with --tensor-parallel {tensor_parallel} nothing is tried, for one "
                "process does not hold the target; leave one of the two out"
            )
        seconds = 0.0
    seconds = 10.0 if seconds is None else seconds
    if seconds < 0:
        raise UserError(f"--seconds {seconds:g}: wanted 0 or more")
    kind = recipe.head.kind
    settings: dict[str, Any] = {"codec": codec, "label_top_k": label_top_k, "dtype": dtype, "device": device}
    settings["layer_ids"] = (recipe.head.layer_ids or None) if kind == "eagle3" else None
    with (looking := Stopwatch()):
        work = survey(
            rows_dir,
            target,
            None,
            features=kind,
            trust_remote_code=trust_remote_code,
            tensor_parallel=tensor_parallel or 0,
            **settings,
        )
    setting = work.plan.setting
    workers = 1 if tensor_parallel else processes or default_processes(work, None)
    training = _training(work, recipe, Path(rows_dir))
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
        "target_bytes": work.target_bytes,
        "memory": _memory(work, recipe),
        "workers": workers,
        "tensor_parallel": tensor_parallel,
        "device": setting.device,
        "dtype": setting.target["dtype"],
        "quantisation": quantisation(work.config),
        "train_tokens": training.tokens,
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
        extracted = try_extraction(work, target, folder / "shards", seconds, trust_remote_code)
        most = max(1, int(extracted.rate * seconds))
        _say(f"extraction: {extracted.rate:,.0f} tokens/s; trying training for about {span(seconds)}", show)
        trained = try_training(folder / "shards", recipe, seconds, most)
    extract = (looking.wall + extracted.seconds(work.plan.tokens / workers)) / 3600
    train, if_free = (training.hours(trained, share) for share in (1.0, trained.share))
    return {
        **found,
        "extract_tokens_per_second_of_a_worker": extracted.rate,
        "train_tokens_per_second": trained.rate,
        "start_seconds": {"extract": looking.wall + extracted.start, "train": trained.start},
        "hours": {"extract": extract, "train": train},
        "hours_if_free": {"extract": extract * extracted.share, "train": if_free},
        "share_of_a_core": {"extract": extracted.share, "train": trained.share},
    }


def _say(text: str, show: bool) -> None:
    if show:
        print(f"plan: {text}", file=sys.stderr, flush=True)


@dataclass(frozen=True)
class _Training:
    """What a recipe does with these rows; every evaluation counts as a new best, which is saved."""

    tokens: int | None  # None: the clock alone ends it
    held_out: int  # tokens of one evaluation
    evaluations: int
    checkpoints: int  # but for the last
    minutes: float | None  # by the clock, after which only one evaluation follows

    def hours(self, tried: Tried, share: float) -> float:
        """Return its hours at the pace `tried`; all but the recipe's clock is told as a `share` of them."""
        ends = []
        if self.tokens is not None:
            evaluated = self.evaluations * self.held_out
            ends.append(share * tried.seconds(self.tokens, evaluated, self.checkpoints))
        if self.minutes is not None:
            ends.append(60 * self.minutes + share * tried.seconds(0, self.held_out))
        return min(ends) / 3600


def _training(work: Survey, recipe: Recipe, rows_dir: Path) -> _Training:
    run = recipe.run
    rows, held_out, _ = rows_of(work.table, recipe, rows_dir)
    order = order_of(recipe, rows, work.table.lengths)
    of_an_epoch, windows = sum(order.lengths), len(order.epoch(0))  # each epoch has about as many
    tokens = run.tokens if run.epochs is None else run.epochs * of_an_epoch
    if run.steps is not None:
        tokens = order.about_tokens(run.steps)
    num_steps = run.steps or math.ceil((tokens or 0) * windows / of_an_epoch)
    between = max(0, num_steps - 1)  # steps after which more follow
    judged = between // run.eval_every if held_out else 0
    both = between // math.lcm(run.eval_every, run.save_every) if held_out else 0
    kept = between // run.save_every + judged - both
    evaluated = int(work.table.lengths[held_out].sum())
    return _Training(tokens, evaluated, judged + 2, kept, run.minutes)


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
