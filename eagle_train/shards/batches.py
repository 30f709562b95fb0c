"""Whole documents laid end to end, with every time shift of training written once: here.

Legend: N packed tokens, R documents, C rows counted at step 0, M label positions, F feature width,
H hidden size, V target vocabulary. Inside one document tokens are x[0..L-1] and an answer span is
[s, e], both inclusive. Row t of a head reads (feature having read x[t], embedding of x[t+1]) and
predicts x[t+2] at step 0, x[t+2+i] at step i.

Row t counts at step i iff t+1 >= s and t+2+i <= e in one and the same span, so the rows of a span
are t = s-1 .. e-2 and row t counts at the steps i < room[t] = e-t-1.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from eagle_train.errors import UserError

if TYPE_CHECKING:
    from eagle_train.shards.row_source import ShardRow

KINDS = ("eagle1", "eagle3", "medusa")


@dataclass(frozen=True)
class PackedBatch:
    """R documents in N packed tokens, and what training and acceptance need of them.

    The teacher's token of packed row r at step i is ``input_ids[r + 2 + i]``, the token whose
    embedding it reads is ``input_ids[r + 1 + i]``, its label is entry ``label0 + i``; all three lie
    in r's own document as long as the row counts at step i.
    """

    input_ids: Tensor  # [N] int64, x[t]
    next_ids: Tensor  # [N] int64, x[t+1]; 0 at a document's last token, where nothing is supervised
    feature: Tensor  # [N, F], feature[t]: having read token t
    position: Tensor  # [N] int64, t within its document
    row_starts: Tensor  # [R+1] int64, first packed index of each document, then N
    rows: Tensor  # [C] int64 ascending, packed index of each row counted at step 0
    room: Tensor  # [C] int64 >= 1, number of steps at which the row counts
    label0: Tensor  # [C] int64, index into label_* of position t+1, the label of step 0
    label_last: Tensor  # [M, H], last hidden state (after the final norm) at label positions; or [M, 0] and:
    label_argmax: Tensor  # [M] int64, most likely token over the whole target vocabulary
    label_ids: Tensor | None = None  # [M, k] int32, the target's likeliest tokens
    label_logp: Tensor | None = None  # [M, k], their log-probabilities over the whole target vocabulary

    @property
    def num_tokens(self) -> int:
        return len(self.input_ids)

    def to(self, device: torch.device | str) -> PackedBatch:
        """Return the same batch on `device`; copies from pinned memory do not wait."""
        return self._map(lambda tensor: tensor.to(device, non_blocking=True))

    def pin(self) -> PackedBatch:
        """Return the same batch with what lies in host memory page-locked (CUDA only)."""
        return self._map(lambda tensor: tensor.pin_memory() if tensor.device.type == "cpu" else tensor)

    def _map(self, change: Callable[[Tensor], Tensor]) -> PackedBatch:
        fields = ((field.name, getattr(self, field.name)) for field in dataclasses.fields(self))
        return PackedBatch(**{name: change(tensor) for name, tensor in fields if tensor is not None})


def pack(documents: Sequence[ShardRow], kind: str) -> PackedBatch:
    """Lay whole documents end to end. `kind` chooses the feature: aux (eagle3), last (eagle1), none (medusa).

    Raises UserError when the shards do not hold the feature that `kind` reads.
    """
    assert documents, "nothing to pack"
    rows, room, label0 = [], [], []
    starts, labels = [0], 0
    for document in documents:
        for s, e in document.spans:
            assert 1 <= s <= e < len(document.input_ids), f"span [{s}, {e}] outside its document"
            t = torch.arange(s - 1, e - 1)  # s-1 .. e-2; empty for an answer of one token
            rows.append(starts[-1] + t)
            room.append(e - t - 1)
            label0.append(labels + t - s + 2)  # labels of a span are s-1 .. e-1; this is position t+1
            labels += e - s + 1
        starts.append(starts[-1] + len(document.input_ids))
    lengths = [len(document.input_ids) for document in documents]
    return PackedBatch(
        input_ids=torch.cat([document.input_ids for document in documents]).long(),
        next_ids=torch.cat([_shifted(document.input_ids) for document in documents]),
        feature=torch.cat([_feature(document, kind) for document in documents]),
        position=torch.cat([torch.arange(length) for length in lengths]),
        row_starts=torch.tensor(starts),
        rows=_cat_int(rows),
        room=_cat_int(room),
        label0=_cat_int(label0),
        label_last=torch.cat([document.label_last for document in documents]),
        label_argmax=torch.cat([document.label_argmax for document in documents]).long(),
        label_ids=_cat_all([document.label_ids for document in documents]),
        label_logp=_cat_all([document.label_logp for document in documents]),
    )


def idle(like: PackedBatch) -> PackedBatch:
    """Return a batch of one token in which nothing counts.

    A process that has no micro-batch left runs this one, so that the others need not wait for it.
    """
    one, none = torch.zeros(1, dtype=torch.int64), torch.zeros(0, dtype=torch.int64)
    return PackedBatch(
        input_ids=one,
        next_ids=one.clone(),
        feature=torch.zeros_like(like.feature[:1]),
        position=one.clone(),
        row_starts=torch.tensor([0, 1]),
        rows=none,
        room=none.clone(),
        label0=none.clone(),
        label_last=like.label_last[:0],
        label_argmax=none.clone(),
        label_ids=None if like.label_ids is None else like.label_ids[:0],
        label_logp=None if like.label_logp is None else like.label_logp[:0],
    )


def counted_rows(spans: Sequence[tuple[int, int]], num_steps: int) -> list[int]:
    """Return how many rows of one document count at each of `num_steps` steps, from its spans alone."""
    return [sum(max(0, e - s - i) for s, e in spans) for i in range(num_steps)]


def _shifted(ids: Tensor) -> Tensor:
    """x[t] -> x[t+1], 0 at the end."""
    return torch.cat([ids[1:].long(), torch.zeros(1, dtype=torch.int64)])


def _cat_int(parts: list[Tensor]) -> Tensor:
    return torch.cat(parts) if parts else torch.zeros(0, dtype=torch.int64)


def _cat_all(parts: list[Tensor | None]) -> Tensor | None:
    """Every document has the part, or none has. float16 is widened: a CPU's autocast cannot join it."""
    there = [part.float() if part.dtype == torch.float16 else part for part in parts if part is not None]
    assert len(there) in (0, len(parts))
    return torch.cat(there) if there else None


def _feature(document: ShardRow, kind: str) -> Tensor:
    assert kind in KINDS, kind
    if kind == "medusa":  # reads the labels' states alone
        return document.label_last.new_zeros(len(document.input_ids), 0)
    feature = document.aux if kind == "eagle3" else document.last_all
    if feature is None:
        raise UserError(
            f"shards: hold no feature for kind '{kind}', wanted "
            f"{'the captured layers' if kind == 'eagle3' else 'the last state of every token'}; "
            f"re-run: eagle extract --for {kind}"
        )
    return feature
