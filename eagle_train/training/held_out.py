"""Rows to train on, in order; those held out, and the acceptance length on them without decoding."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from eagle_train.config import Recipe
from eagle_train.errors import UserError
from eagle_train.losses.acceptance import AcceptanceCounts, chain_hits, greedy_chain
from eagle_train.progress import counted
from eagle_train.shards.sampler import Plan

if TYPE_CHECKING:
    import numpy as np

    from eagle_train.heads.disk import Head
    from eagle_train.shards.batches import PackedBatch
    from eagle_train.shards.frozen_target import FrozenTarget
    from eagle_train.shards.plan import RowTable
    from eagle_train.shards.row_source import RowSource

_FEW = 5  # conversations


def rank(conversation_id: str) -> str:
    """Return what decides whether a conversation is held out, 64 hex digits: those of low rank are."""
    return hashlib.sha256(conversation_id.encode()).hexdigest()


def split(conversation_ids: Sequence[str], held_out: float) -> tuple[list[int], list[int]]:
    """Return (training rows, held-out rows), all rows of a conversation on one side.

    `held_out` is a share of conversations (below 1; at least one conversation when above 0) or a number
    of them. Which ones depends on their ids alone: the smallest hashes.
    """
    order = sorted(set(conversation_ids), key=rank)
    share = held_out < 1
    number = round(held_out * len(order)) if share else int(held_out)
    chosen = set(order[: max(number, 1) if held_out > 0 else 0])
    sides: tuple[list[int], list[int]] = ([], [])
    for row, conversation in enumerate(conversation_ids):
        sides[conversation in chosen].append(row)
    return sides


def rows_of(
    rows: RowSource | RowTable, recipe: Recipe, where: Path
) -> tuple[list[int], list[int], dict[str, Any]]:
    """Return (training rows, held-out rows, their counts); rows in which nothing counts are left out.

    Raises UserError, naming the folder `where`, when none is left to train on.
    """
    conversations = rows.conversation_ids
    sides = split(conversations, recipe.data.held_out)
    counting = [any(e > s for s, e in spans) for spans in rows.spans]
    train, held_out = ([row for row in side if counting[row]] for side in sides)
    if not any(counting):
        raise UserError(
            f"{where}: no answer of two tokens or more in {len(counting)} rows, nothing to "
            "train on; look at the rows with eagle inspect"
        )
    if not train:
        raise UserError(
            f"{where}: data.held_out {recipe.data.held_out:g} leaves none of "
            f"{len(set(conversations))} conversations to train on; lower it"
        )
    facts = {
        "train_rows": len(train),
        "held_out_rows": len(held_out),
        "held_out_conversations": len({conversations[row] for row in sides[1]}),
        "held_out_to": max((rank(conversations[row]) for row in sides[1]), default=""),
        "rows_without_labels": counting.count(False),
    }
    return train, held_out, facts


def on_held_out(conversations: int | None) -> str:
    """Say on what an acceptance length was predicted, and where that is too little for a firm figure."""
    if conversations is None:  # not recorded
        return "on held-out conversations"
    rough = " (so few give a rough figure)" if conversations < _FEW else ""
    return f"on {counted(conversations, 'held-out conversation')}{rough}"


def order_of(recipe: Recipe, rows: Sequence[int], lengths: np.ndarray) -> Plan:
    """Return the order in which a run sees its training rows; `lengths` are those of all rows."""
    data = recipe.data
    own = tuple(int(lengths[row]) for row in rows)
    return Plan(tuple(rows), own, recipe.run.seed, data.tokens_per_step, data.rows_per_step)


def predict_chain(
    head: Head, frozen: FrozenTarget, batches: Iterable[PackedBatch], gamma: int
) -> AcceptanceCounts:
    """Return what greedy chain decoding with `gamma` guesses would count on the batches' answers.

    Exact for text that the target generated greedily in the same precision, with features not rounded.
    """
    counts = AcceptanceCounts(histogram=(0,) * (gamma + 1))
    for batch in batches:
        counts += greedy_chain(chain_hits(head, frozen, batch, gamma), batch)
    return counts
