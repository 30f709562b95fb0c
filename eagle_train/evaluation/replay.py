"""What a draft would accept on a text that the target wrote, replayed over tables made in one pass.

Legend: S steps, C rows counted at step 0 (shards/batches.py). The tables are teacher-forced: entry [i, c] is
the head's guess of step i at row c given that all earlier ones were right, which is when it matters. Ranks
decide a greedy chain and a static tree; shares decide a sampled chain. Both exactly, where the features are
not rounded and the text was written by the same target with the same settings.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from eagle_train.decoding.sampling import Sampling, distribution, processed
from eagle_train.heads.disk import Head
from eagle_train.heads.draft_vocab import to_draft
from eagle_train.losses.acceptance import AcceptanceCounts, draft_logits, draft_steps
from eagle_train.shards.batches import PackedBatch
from eagle_train.shards.frozen_target import FrozenTarget

NEVER = 1 << 30  # the rank of a token outside the draft vocabulary
_ROWS_AT_ONCE = 256


@dataclass(frozen=True)
class Tables:
    """How the head stood to the text's tokens; entries where a row no longer counts mean nothing."""

    ranks: Tensor  # [S, C] int64, of the text's token among the head's guesses, 0 the best
    sure: Tensor  # [S, C] float, the probability that the head gives its best guess
    said: Tensor  # [S, C] float, the probability that it gives the text's token
    shares: Tensor  # [S, C] float, min(1, q(x) / p(x)): a sampled guess stood with this probability
    room: list[int]  # [C], steps at which a row counts
    impossible: list[int] = field(default_factory=list)  # rows whose next token the sampling law never draws


@torch.no_grad()
def tables(head: Head, frozen: FrozenTarget, batch: PackedBatch, steps: int, sampling: Sampling) -> Tables:
    """Return the tables of a packed batch for `steps` guesses.

    The target's own processors of logits change nothing but `shares`: where a greedy guess stands, the text
    alone decides, which they have shaped already.
    """
    shape, device = (steps, len(batch.rows)), batch.rows.device
    ranks = torch.full(shape, NEVER, device=device)
    sure, said, shares = (torch.zeros(shape, device=device) for _ in range(3))
    impossible: list[int] = []
    draft_of = to_draft(head.draft_ids, head.config.vocab_size)
    texts = _texts(batch) if sampling.reads_text else []
    for step in draft_steps(head, frozen, batch, steps):
        for out, index in zip(step.out.split(_ROWS_AT_ONCE), step.index.split(_ROWS_AT_ONCE), strict=True):
            token = batch.input_ids[batch.rows[index] + 2 + step.number]  # x[t+2+i]
            logits = draft_logits(head, out, frozen, step.number).float()  # (c, D)
            own, drafted = draft_of[token], draft_of[token] >= 0
            score = logits.gather(1, own.clamp(min=0)[:, None])
            above = (logits > score).sum(1)
            ranks[step.number, index] = torch.where(drafted, above, NEVER)
            law = logits.softmax(-1)
            sure[step.number, index] = law.amax(-1)
            said[step.number, index] = torch.where(drafted, law.gather(1, own.clamp(min=0)[:, None])[:, 0], 0)
            if not sampling.greedy:
                target = frozen.logits(batch.label_last[batch.label0[index] + step.number])  # (c, V)
                if sampling.reads_text:
                    read = (texts[entry] for entry in index.tolist())
                    target = torch.stack(
                        [
                            processed(logits_of, ids[: known + step.number], sampling, begun)
                            for logits_of, (ids, known, begun) in zip(target, read, strict=True)
                        ]
                    )
                p = distribution(target, sampling).gather(1, token[:, None])[:, 0]
                q = distribution(logits, sampling).gather(1, own.clamp(min=0)[:, None])[:, 0]
                shares[step.number, index] = torch.where(drafted & (q > 0), (q / p).clamp(max=1), 0)
                if step.number == 0:  # where every token of an answer that the head guesses comes by
                    impossible += index[p == 0].tolist()
    return Tables(ranks, sure, said, shares, batch.room.tolist(), impossible)


def _texts(batch: PackedBatch) -> list[tuple[list[int], int, int]]:
    """Return for each entry its document, how many tokens of it step 0 follows, where its answer began."""
    documents = [part.tolist() for part in batch.input_ids.split(batch.row_starts.diff().tolist())]
    owner = (torch.searchsorted(batch.row_starts, batch.rows, right=True) - 1).tolist()
    found, room, first = [], batch.room.tolist(), 0
    for entry, position in enumerate(batch.position[batch.rows].tolist()):
        if entry >= first + room[first]:  # the next answer, whose first row t = s - 1 reads its token x[s]
            first = entry
        found.append((documents[owner[entry]], position + 2, position + 1 - (entry - first)))
    return found


def replay_paths(
    ranks: Tensor,
    room: Sequence[int],
    paths: Sequence[Sequence[int]],
    began: list[tuple[int, int]] | None = None,
) -> AcceptanceCounts:
    """Return what a static tree of these paths of ranks accepts; a chain is the paths of zeros.

    Exact for greedy text, and for sampled text under the rule of the target's law alone: given the token
    that was written, a guess of it stood for certain. `ranks` [S, C] and `room` [C] are those of `Tables`;
    `began` is given the entry at which each round began and the tokens it emitted.
    """
    have = {tuple(path) for path in paths}
    rank_of, depth = ranks.T.tolist(), max(map(len, have))
    histogram, rounds, tokens, at = [0] * (depth + 1), 0, 0, 0
    while at < len(room):
        path: tuple[int, ...] = ()
        while len(path) < min(depth, room[at]) and (*path, rank_of[at][len(path)]) in have:
            path = (*path, rank_of[at][len(path)])
        emitted = min(len(path) + 1, room[at])
        if began is not None:
            began.append((at, emitted))
        histogram[len(path)] += 1
        rounds, tokens, at = rounds + 1, tokens + emitted, at + emitted
    return AcceptanceCounts(rounds, tokens, tuple(histogram))


@dataclass(frozen=True)
class Expected:
    """A chain's expected figures."""

    rounds: float
    tokens: int
    made: tuple[float, ...]  # made[g]: rounds with g guesses
    began: tuple[tuple[int, float, float], ...] = ()  # of each row: how many rounds began, what they emitted

    @property
    def tau(self) -> float:
        """Tokens per round."""
        return self.tokens / self.rounds if self.rounds else 1.0


def replay_chain(found: Tables, gamma: int, greedy: bool, stop: float = 0.0) -> Expected:
    """Return what a chain of up to `gamma` guesses is expected to need for the text.

    Given the text, guess i stood with its share (a greedy one if its rank is 0), independently of all else;
    so the expected number of rounds that begin at a row follows from those at rows before (a dynamic
    programme). With `stop` a chain ends where the probability of the guesses so far times that of the head's
    best one falls below it; how many guesses follow a wrong one, which the text does not tell, is taken as if
    it had been right. That changes `made` alone.
    """
    stands = (found.ranks == 0).double() if greedy else found.shares.double()
    given = found.sure if greedy else found.said  # of a guess that stood: it is the text's token
    stood, sure, likely = stands.T.tolist(), found.sure.T.tolist(), given.T.tolist()
    visits, made, tokens, start = [0.0] * (len(found.room) + gamma + 2), [0.0] * (gamma + 1), 0, 0
    began = []
    for row, room in enumerate(found.room):
        if row == start:  # an answer's first row: its room leads to the next answer's
            visits[row] += 1
            tokens, start = tokens + room, start + room
        guesses, reach = 0, 1.0
        while guesses < gamma:
            step = min(guesses, room - 1)  # past the answer's end there is no table; the last entry serves
            if stop and reach * sure[row][step] < stop:
                break
            reach, guesses = reach * likely[row][step], guesses + 1
        made[guesses] += visits[row]
        left, emitted = visits[row], 0.0
        for accepted in range(min(guesses, room)):
            stays = left * stood[row][accepted]
            emitted += (accepted + 1) * (left - stays)
            if accepted + 1 < room:
                visits[row + accepted + 1] += left - stays
            left = stays
        if guesses + 1 < room:
            visits[row + guesses + 1] += left
        began.append((row, visits[row], emitted + min(guesses + 1, room) * left))
    return Expected(sum(made), tokens, tuple(made), tuple(began))
