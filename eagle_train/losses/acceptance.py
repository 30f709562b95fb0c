"""Acceptance length without decoding: what a greedy chain would accept on text the target wrote.

With teacher forcing, step i's guess at row t is what the drafting loop would produce as long as all
earlier guesses of the chain were right, because an accepted guess is the teacher's token. So a table of
hits, one bit per row and step, replays the loop. Exact when the text was generated greedily by the same
target in the same precision from features that are not rounded.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from eagle_train.heads.medusa import MedusaHead
from eagle_train.heads.ttt import TttStep, unroll

if TYPE_CHECKING:
    from eagle_train.heads.disk import Head
    from eagle_train.shards.batches import PackedBatch
    from eagle_train.shards.frozen_target import FrozenTarget

_LOGITS_AT_ONCE = 1 << 24  # elements


@dataclass(frozen=True)
class AcceptanceCounts:
    """Rounds of verification and what they emitted; add up to pool prompts, never average their means.

    `histogram[k]` is the number of rounds in which exactly k guesses were accepted and emitted. Tokens
    past the end of an answer do not count; the token of the prefill is not a round.
    """

    rounds: int = 0
    tokens: int = 0
    histogram: tuple[int, ...] = ()

    def __add__(self, other: AcceptanceCounts) -> AcceptanceCounts:
        depth = max(len(self.histogram), len(other.histogram))
        padded = [counts + (0,) * (depth - len(counts)) for counts in (self.histogram, other.histogram)]
        return AcceptanceCounts(
            self.rounds + other.rounds,
            self.tokens + other.tokens,
            tuple(a + b for a, b in zip(*padded, strict=True)),
        )

    @property
    def tau(self) -> float:
        """Acceptance length: emitted tokens per round; 1.0 when never right, or without any round."""
        return self.tokens / self.rounds if self.rounds else 1.0

    @property
    def accepted_by_position(self) -> tuple[float, ...]:
        """Share of all rounds whose first i+1 guesses were all accepted, for i = 0, 1, .."""
        return tuple(count / max(self.rounds, 1) for count in self._reached()[1:])

    @property
    def accepted_given_previous(self) -> tuple[float, ...]:
        """Share of the rounds whose first i guesses were accepted in which guess i+1 was as well."""
        reached = self._reached()
        return tuple(after / max(before, 1) for before, after in pairwise(reached))

    def _reached(self) -> list[int]:
        """Rounds with at least k accepted guesses, k = 0, 1, .."""
        return [sum(self.histogram[k:]) for k in range(len(self.histogram))]


def greedy_chain(hits: Tensor, batch: PackedBatch) -> AcceptanceCounts:
    """Replay greedy chain decoding over a table of hits.

    `hits` [gamma, C] bool: the head's guess of step i at batch.rows[c] is the teacher's token; entries at
    steps where the row no longer counts (i >= room) are ignored. A round at row t with n leading hits
    emits min(n+1, e-1-t) tokens and the next begins at row t+n+1.
    """
    gamma = len(hits)
    steps = torch.arange(gamma, device=hits.device)[:, None]
    leading = (hits & (steps < batch.room)).long().cumprod(0).sum(0).tolist()  # [C]
    rooms = batch.room.tolist()
    rounds = tokens = 0
    histogram = [0] * (gamma + 1)
    at = 0
    while at < len(rooms):
        accepted, room = leading[at], rooms[at]
        rounds += 1
        tokens += min(accepted + 1, room)
        histogram[accepted] += 1
        at += min(
            accepted + 1, room
        )  # rows of an answer are consecutive; room of them are left, this one included
    return AcceptanceCounts(rounds, tokens, tuple(histogram))


@torch.no_grad()
def chain_hits(
    head: Head, frozen: FrozenTarget, batch: PackedBatch, gamma: int, own_choices: bool = False
) -> Tensor:
    """Return the table of hits for `greedy_chain`: [gamma, C] bool, false where a row no longer counts.

    A hit is the text's token or, with `own_choices`, the target's first choice after that text. An EAGLE-1
    head is rolled out over its own predicted features in the same way; Medusa's heads each make one step,
    those past their number are never right.
    """
    hits = torch.zeros((gamma, len(batch.rows)), dtype=torch.bool, device=batch.rows.device)
    size = max(1, _LOGITS_AT_ONCE // head.config.draft_vocab_size)
    for step in draft_steps(head, frozen, batch, gamma):
        if own_choices:
            teacher = batch.label_argmax[batch.label0[step.index] + step.number]
        else:
            teacher = batch.input_ids[batch.rows[step.index] + 2 + step.number]
        for out, index, token in zip(
            step.out.split(size), step.index.split(size), teacher.split(size), strict=True
        ):
            guess = head.target_ids(draft_logits(head, out, frozen, step.number).argmax(-1))
            hits[step.number, index] = guess == token
    return hits


def draft_steps(head: Head, frozen: FrozenTarget, batch: PackedBatch, gamma: int) -> Iterator[TttStep]:
    """Yield the head's output for the rows that count at each step."""
    if not isinstance(head, MedusaHead):
        yield from unroll(head, frozen, batch, gamma)
        return
    for number in range(min(gamma, head.config.medusa_heads)):
        index = (batch.room > number).nonzero().flatten()
        yield TttStep(number, head(head.states(batch, index), number), index)


def draft_logits(head: Head, out: Tensor, frozen: FrozenTarget, step: int) -> Tensor:
    """Return draft logits [C_i, D] of what `draft_steps` yielded at `step`."""
    return head.logits(out, frozen, step) if isinstance(head, MedusaHead) else head.logits(out, frozen)
