"""What dynamic trees would accept on a text that the target wrote, replayed without the target.

Legend: C rows counted at step 0 (shards/batches.py), D levels. At every row at which a round may begin the
head, having read the true features before it, grows the whole tree of one `top_k` once; a tree of fewer
levels or nodes holds the best of the same nodes, so it needs no growing of its own. A guess stands where the
path of the text's own tokens runs through it. So the rounds are exactly those of the loop where the text was
written by the same target with the same settings and the features are not rounded: greedily, and sampled
too, since dynamic trees then stand by the target's law alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import cast

import torch
from torch import Tensor

from eagle_train.decoding.asking import answered
from eagle_train.decoding.drafters import HeadDrafter
from eagle_train.decoding.reader import Rows
from eagle_train.decoding.sampling import SeededChance
from eagle_train.decoding.shapes import Dynamic
from eagle_train.decoding.trees import growing_dynamic
from eagle_train.evaluation.replay import NEVER
from eagle_train.heads.disk import Head
from eagle_train.losses.acceptance import AcceptanceCounts
from eagle_train.shards.batches import PackedBatch
from eagle_train.shards.frozen_target import FrozenTarget
from eagle_train.targets.load import Target


@dataclass(frozen=True)
class TreeTables:
    """How the text ran through the trees of one `top_k`."""

    top_k: int
    ranks: (
        Tensor  # [C, D, D] int64: [c, d-1, i] of the text's guess i, by score among d levels' nodes, 0 best
    )
    steps: dict[tuple[int, int], float]  # (guesses, levels) -> drafting steps after the first, in the mean
    room: list[int]  # [C], steps at which a row counts

    @property
    def depth(self) -> int:
        """D."""
        return self.ranks.shape[1]

    def most_guesses(self, depth: int) -> int:
        """Return how many nodes so many levels hold."""
        return self.top_k + (depth - 1) * self.top_k**2


def drafter_of_tables(head: Head, frozen: FrozenTarget, num_layers: int) -> HeadDrafter:
    """Return a drafter for a target that is not there: drafting asks for its tables and sizes alone."""
    sizes = {"vocab_size": frozen.vocab_size, "hidden_size": frozen.hidden_size, "num_layers": num_layers}
    place = {"device": frozen.device, "dtype": frozen.dtype, "name": frozen.target.get("name")}
    there = SimpleNamespace(embedding=frozen.embedding, frozen=lambda: frozen, **sizes, **place)
    return HeadDrafter(head, cast(Target, there), Dynamic())


@torch.inference_mode()
def tree_tables(
    drafter: HeadDrafter, batch: PackedBatch, top_k: int, depth: int, budgets: Sequence[int]
) -> TreeTables:
    """Return the tables of a packed batch, with the steps for each of `budgets`, which are in guesses.

    Steps are counted over the rows whose next token is among the first `top_k`: at the others nothing is
    accepted, whatever is grown.
    """
    ranks = torch.full((len(batch.rows), depth, depth), NEVER)
    sums, grown, read = dict.fromkeys(((n, d) for n in budgets for d in range(1, depth + 1)), 0), 0, -1
    document = torch.searchsorted(batch.row_starts, batch.rows, right=True) - 1
    for entry, (row, number) in enumerate(zip(batch.rows.tolist(), document.tolist(), strict=True)):
        start = int(batch.row_starts[number])
        if read < start:
            drafter.begin(SeededChance(0))
            read = start - 1
        tokens = batch.input_ids[read + 1 : row + 2]
        feature = batch.feature[read + 1 : row + 1]
        drafter.observe(Rows(read + 1 - start, tokens, feature if drafter.layer_ids else None, feature))
        read = row
        text = batch.input_ids[row + 2 : row + 2 + min(depth, int(batch.room[entry]))].tolist()
        tree = _grown(drafter, text[0], top_k, depth)
        if tree is None:
            continue
        tokens_of, parents, scores = tree
        level = _levels(parents)
        ranks[entry] = _ranks(_path(tokens_of, parents, text), level, scores, depth)
        for size, number_of_steps in _steps(level, scores, budgets, depth).items():
            sums[size] += number_of_steps
        grown += 1
    steps = {key: total / grown if grown else float(key[1] - 1) for key, total in sums.items()}
    return TreeTables(top_k, ranks, steps, batch.room.tolist())


def _grown(
    drafter: HeadDrafter, token: int, top_k: int, depth: int
) -> tuple[list[int], tuple[int, ...], Tensor] | None:
    """Return tokens, parents and scores of all nodes but the root; None where `token` is no first guess."""
    head = drafter.head
    first = head.logits(drafter.last_out, drafter.frozen)  # (D,)
    best = head.target_ids(first.topk(min(top_k, len(first))).indices)
    if token not in best.tolist():
        return None
    every = 1 + top_k + (depth - 1) * top_k**2
    growing = growing_dynamic(first, total_tokens=every, top_k=top_k, depth=depth)
    ids, parents, scores = answered(growing, lambda rows: drafter.expand(*rows))
    return head.target_ids(ids).tolist(), parents, scores.cpu()


def _levels(parents: tuple[int, ...]) -> Tensor:
    """Return the level of each node but the root, the root's children being 1."""
    levels = [0]
    for parent in parents[1:]:
        levels.append(levels[parent] + 1)
    return torch.tensor(levels[1:])


def _path(tokens: list[int], parents: tuple[int, ...], text: list[int]) -> list[int]:
    """Return the nodes, counted without the root, that the text runs through."""
    path, at = [], 0
    for token in text:
        below = [i for i, parent in enumerate(parents[1:]) if parent == at and tokens[i] == token]
        if not below:
            break
        path.append(below[0])
        at = below[0] + 1
    return path


def _ranks(path: list[int], level: Tensor, scores: Tensor, depth: int) -> Tensor:
    """Return [D, D]: the rank of the path's nodes among the nodes of the first d levels, NEVER beyond it.

    Of equal scores the node found first is kept, as `growing_dynamic` keeps it.
    """
    nodes, order = torch.tensor(path), torch.arange(len(scores))
    better = scores > scores[nodes, None]
    better |= (scores == scores[nodes, None]) & (order < nodes[:, None])  # (path, nodes)
    ranks = torch.full((depth, depth), NEVER)
    for levels in range(1, depth + 1):
        within = min(levels, len(path))
        ranks[levels - 1, :within] = (better & (level <= levels)).sum(1)[:within]
    return ranks


def _steps(level: Tensor, scores: Tensor, budgets: Sequence[int], depth: int) -> dict[tuple[int, int], int]:
    """Return how often each tree is expanded after its first level: growing stops where nothing can enter."""
    steps = {}
    best = [scores[level <= levels].sort(descending=True).values.tolist() for levels in range(depth + 1)]
    frontier = [max(scores[level == levels].tolist(), default=0.0) for levels in range(depth + 1)]
    for guesses in budgets:
        open_until = depth - 1
        for at in range(1, depth):
            if len(best[at]) >= guesses and frontier[at] <= best[at][guesses - 1]:
                open_until = at - 1
                break
        for levels in range(1, depth + 1):
            steps[guesses, levels] = min(levels - 1, open_until)
    return steps


def replay_tree(
    found: TreeTables, guesses: int, depth: int, began: list[tuple[int, int]] | None = None
) -> AcceptanceCounts:
    """Return what a dynamic tree of so many guesses and levels accepts, round by round.

    `began` is given the entry at which each round began and the tokens it emitted.
    """
    stands = (found.ranks[:, depth - 1, :depth] < guesses).long().cumprod(1).sum(1).tolist()  # [C]
    histogram, rounds, tokens, at = [0] * (depth + 1), 0, 0, 0
    while at < len(found.room):
        accepted = min(stands[at], found.room[at])
        emitted = min(accepted + 1, found.room[at])
        histogram[accepted] += 1
        if began is not None:
            began.append((at, emitted))
        rounds, tokens, at = rounds + 1, tokens + emitted, at + emitted
    return AcceptanceCounts(rounds, tokens, tuple(histogram))
