"""The training-time test: a head drafting S steps ahead on known text, all rows of a batch at once.

At step i row t reads its own carried hidden state and the embedding of x[t+1+i], at position t+i, and
attends to the step-0 keys of rows <= t and to the keys of its own row's steps 1..i. That equals
drafting step by step with a key-value cache whose older entries come from true features.

Only rows that still count are computed at steps >= 1; step 0 computes keys and values on
the rows before them too.
Source: EAGLE-3 (arXiv 2503.01840), section 3.2.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from eagle_train.heads.attention import attend_runs, find_runs
from eagle_train.heads.disk import EagleHead
from eagle_train.heads.layer import Attend

if TYPE_CHECKING:
    from eagle_train.shards.batches import PackedBatch
    from eagle_train.shards.frozen_target import FrozenTarget


@dataclass(frozen=True)
class TttStep:
    """What step `number` computed: `out` [C_i, H], pre-norm, for entries `index` [C_i] of batch.rows.

    `counted` [K_i] are the places within `out` that count at this step, None where all do.
    """

    number: int
    out: Tensor
    index: Tensor
    counted: Tensor | None = None


class Memory(Protocol):
    """Keys and values of an unroll, per head layer. The dense twin of the tests has the same shape."""

    def at_step0(self, rows: Tensor) -> Attend: ...
    def narrow(self, keep: Tensor) -> None: ...
    def at_later_step(self) -> Attend: ...


def unroll(
    head: EagleHead,
    frozen: FrozenTarget,
    batch: PackedBatch,
    num_steps: int,
    counted: Tensor | None = None,
    memory: Callable[[Tensor], Memory] | None = None,
) -> Iterator[TttStep]:
    """Yield the head's teacher-forced output of each step, for the rows that still matter.

    `counted` [S, C] bool narrows what counts at each step further than batch.room does; a row is then
    computed as long as it counts at this or a later step. Stops early when no row is left.
    """
    alive, counts = _plan(batch, num_steps, counted)
    out = torch.empty(0)
    for i, index in enumerate(alive):
        rows = batch.rows[index]
        if i == 0:
            seen, asking, starts = _read_rows(rows, batch.row_starts)
            keys = (memory or RunMemory)(starts)
            hidden = head.start(batch.feature.index_select(0, seen))  # (N, F) -> (K, H)
            embeds = frozen.embed(batch.next_ids[seen])  # x[t+1]
            out = head(hidden, embeds, batch.position[seen], keys.at_step0(asking), asking)
        else:
            keep = torch.searchsorted(alive[i - 1], index)  # places among the rows of the step before
            keys.narrow(keep)
            hidden = head.carry(out).index_select(0, keep)  # own output, at its own row
            embeds = frozen.embed(batch.input_ids[rows + 1 + i])
            out = head(hidden, embeds, batch.position[rows] + i, keys.at_later_step())
        yield TttStep(i, out, index, counts[i])


def _plan(
    batch: PackedBatch, num_steps: int, counted: Tensor | None
) -> tuple[list[Tensor], list[Tensor | None]]:
    """Return per step the entries of batch.rows to compute, and the places among them that count."""
    alive: list[Tensor] = []
    counts: list[Tensor | None] = []
    if counted is None:
        for i in range(num_steps):
            alive.append((batch.room > i).nonzero().flatten())
            counts.append(None)
    else:
        within = counted & (batch.room > torch.arange(num_steps, device=batch.room.device)[:, None])  # [S, C]
        needed = within.flip(0).cumsum(0).flip(0) > 0  # at this step or a later one
        for i in range(num_steps):
            alive.append(needed[i].nonzero().flatten())
            counts.append(within[i, alive[i]].nonzero().flatten())
    used = next((i for i, index in enumerate(alive) if not len(index)), num_steps)
    return alive[:used], counts[:used]


def _read_rows(rows: Tensor, row_starts: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Leave out what no counted row reads: the rows of a document behind its last counted one.

    Returns the packed rows kept [K], the places of `rows` among them, and the documents' starts there.
    """
    starts = row_starts[:-1]
    last = torch.searchsorted(rows, row_starts[1:]) - 1  # the last of `rows` before each document's end
    ends = torch.where(last >= 0, rows[last.clamp(min=0)] + 1, starts)
    lengths = (ends - starts).clamp(min=0)  # 0 where the document has no row
    kept = torch.nn.functional.pad(lengths.cumsum(0), (1, 0))  # [R+1]
    shift = starts - kept[:-1]  # [R], packed index minus kept index
    seen = torch.arange(int(kept[-1]), device=rows.device) + shift.repeat_interleave(lengths)
    document = torch.searchsorted(row_starts, rows, right=True) - 1
    return seen, rows - shift[document], kept


class RunMemory:
    """The fast path: fused attention over runs of consecutive rows, merged with the own-row keys."""

    def __init__(self, starts: Tensor) -> None:
        """`starts` [R+1] are the documents' first rows among those whose keys step 0 computes."""
        self._starts = starts
        self._first: dict[int, tuple[Tensor, Tensor]] = {}  # layer -> keys and values of step 0, all rows
        self._own: dict[int, list[tuple[Tensor, Tensor]]] = {}  # layer -> those of later steps, own rows

    def at_step0(self, rows: Tensor) -> Attend:
        self._rows = rows
        self._runs = find_runs(rows, self._starts)

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            self._first[layer], self._own[layer] = (k, v), []
            whole = len(q) == len(k)  # below the top layer every row asks
            runs = find_runs(torch.arange(len(k)), self._starts) if whole else self._runs
            return attend_runs(q, k, v, [], runs)

        return attend

    def narrow(self, keep: Tensor) -> None:
        """Keep the rows at these places only, in every own-row key and value."""
        self._rows = self._rows[keep]
        self._runs = find_runs(self._rows, self._starts)
        self._own = {
            layer: [(k.index_select(0, keep), v.index_select(0, keep)) for k, v in pairs]
            for layer, pairs in self._own.items()
        }

    def at_later_step(self) -> Attend:
        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            self._own[layer].append((k, v))
            return attend_runs(q, *self._first[layer], self._own[layer], self._runs)

        return attend
