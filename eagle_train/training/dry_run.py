"""A rehearsal: build everything, overfit one row for a few steps, and see acceptance rise.

A head that cannot learn one row by heart will not learn many: better seen within a minute than in hours.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from eagle_train.config import Recipe
from eagle_train.errors import UserError
from eagle_train.heads.disk import Head
from eagle_train.losses.acceptance import AcceptanceCounts, chain_hits, greedy_chain
from eagle_train.shards.batches import PackedBatch
from eagle_train.training.description import describe
from eagle_train.training.loader import Micro
from eagle_train.training.processes import join_processes, pick_precision
from eagle_train.training.session import Session, build_session
from eagle_train.training.source import LiveTarget, open_source
from eagle_train.training.zero import check_optimizer

MOST_STEPS, MOST_SECONDS = 300, 60.0
LEARNING_RATE = 2e-3


@dataclass(frozen=True)
class Rehearsal:
    """What `dry_run` saw. Acceptance lengths count the target's own first choices as the text."""

    steps: int
    loss: tuple[float, float]  # of the first test-time step, first and last
    tau: tuple[float, float]  # before and after
    longest: float  # what a head that is always right would reach on this row
    learned: bool  # acceptance went at least half of the way up
    seconds_per_step: float
    description: str


def dry_run(
    place: str | Path,
    recipe: Recipe,
    *,
    live: LiveTarget | None = None,
    init_from: str | None = None,
    deepspeed: str | None = None,
    show: bool = True,
) -> Rehearsal:
    """Train on one row again and again with AdamW at a high rate; nothing is written.

    `place` holds shards, or rows where a `live` target computes their features.
    Raises UserError for all that `train` would refuse, but for the state of an --out folder; also
    where the row has nothing to learn from.
    """
    if deepspeed is not None:
        check_optimizer(recipe.optim)
    processes = join_processes()
    dtype = pick_precision(recipe.run.precision, processes.device)
    live = None if live is None else replace(live, max_disk=None)
    source = open_source(Path(place), recipe, processes, dtype, live, Path("dry run"), 0)
    hasty = replace(recipe, optim=replace(recipe.optim, name="adamw", lr=LEARNING_RATE, ema=0.0))
    session = build_session(processes, source, hasty, Path("dry run"), None, init_from, deepspeed)
    show = show and processes.is_main
    description = describe(session).splitlines()[0]
    if show:
        print(description, file=sys.stderr)
    micros = _one_row(session)
    longest = _chain(session, micros, always_right=True).tau
    if longest <= 1:
        raise UserError(
            "dry run: the row that it took has nothing to learn from: nowhere in its answers is the target's "
            "first choice a token that the head can draft; --set run.seed=N takes another row; where all are "
            "so, set a larger head.draft_vocab_size, or take answers that the target wrote"
        )
    before = after = _chain(session, micros).tau
    losses: list[float] = []
    begun, due = time.monotonic(), True
    while due:
        losses.append(_step(session, micros))
        seconds, _ = processes.agree(time.monotonic() - begun, False)
        due = len(losses) < MOST_STEPS and seconds < MOST_SECONDS
        if len(losses) % 10 == 0 or not due:
            after = _chain(session, micros).tau
            if show:
                words = f"step {len(losses)}: loss {losses[-1]:.3f}, acceptance length {after:.2f}"
                print(f"{words} of {longest:.2f}", file=sys.stderr)
            due = due and after < 1 + 0.95 * (longest - 1)
    return Rehearsal(
        steps=len(losses),
        loss=(losses[0], losses[-1]),
        tau=(before, after),
        longest=longest,
        learned=after - 1 >= 0.5 * (longest - 1),
        seconds_per_step=(time.monotonic() - begun) / len(losses),
        description=description,
    )


def _one_row(session: Session) -> list[Micro]:
    window = next(session.windows())
    return list(session.loader.training([replace(window, rows=window.rows[:1])]))


def _step(session: Session, micros: list[Micro]) -> float:
    device = session.processes.device
    sums = torch.zeros(2, device=device)
    for micro in micros:
        result = session.engine.accumulate(micro.batch.to(device), micro.counts.to(device), micro.closes)
        sums += torch.stack([result.loss_sums[0], result.rows[0]]).to(sums.dtype)
    session.engine.update(1.0)
    loss, rows = session.processes.sum(sums).tolist()
    return loss / max(rows, 1.0)


def _chain(session: Session, micros: list[Micro], always_right: bool = False) -> AcceptanceCounts:
    """What a greedy chain would count if the target's first choices were the text, on all processes."""
    gamma, device = session.recipe.run.eval_gamma, session.processes.device
    mine = AcceptanceCounts(histogram=(0,) * (gamma + 1))
    with session.engine.evaluated() as head, session.engine.autocast():
        for batch in _counting(session, micros):
            if always_right:
                hits = _within_reach(head, batch, gamma)
            else:
                hits = chain_hits(head, session.frozen, batch, gamma, own_choices=True)
            mine += greedy_chain(hits, batch)
    counts = torch.tensor([mine.rounds, mine.tokens, *mine.histogram], device=device)
    rounds, tokens, *histogram = session.processes.sum(counts).tolist()
    return AcceptanceCounts(rounds, tokens, tuple(histogram))


def _within_reach(head: Head, batch: PackedBatch, gamma: int) -> Tensor:
    """Return [gamma, C] bool, true where a guess is made and could be the target's first choice."""
    reach = torch.zeros((gamma, len(batch.rows)), dtype=torch.bool, device=batch.rows.device)
    for i in range(min(gamma, head.config.medusa_heads or gamma)):
        at = (batch.room > i).nonzero().flatten()
        reach[i, at] = head.in_draft[batch.label_argmax[batch.label0[at] + i]]
    return reach


def _counting(session: Session, micros: list[Micro]) -> Iterator[PackedBatch]:
    return (m.batch.to(session.processes.device) for m in micros if len(m.batch.rows))


def as_json(found: Rehearsal) -> dict[str, Any]:
    """Return the figures under their names."""
    return {name: value for name, value in vars(found).items() if name != "description"}
