"""What one training step hands back, the same for every kind of head."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor, nn

from eagle_train.heads.ttt import TttStep

if TYPE_CHECKING:
    from eagle_train.shards.batches import PackedBatch


class StepResult(NamedTuple):
    """Legend: S test-time steps (one for EAGLE-1)."""

    loss: Tensor  # scalar; its gradient is that of sum_i weight_i * loss_sums_i / counts_i
    loss_sums: Tensor  # [S] detached, sums over counted rows
    hits: Tensor  # [S] int64, rows whose first choice is the target's
    rows: Tensor  # [S] int64, rows counted


@dataclass(frozen=True)
class CountedRows:
    """All rows that count, step after step. R rows of all steps together."""

    out: Tensor  # [R, H], the head's output before its final norm
    step: Tensor  # [R] int64
    label: Tensor  # [R] int64, index into the batch's label_*
    rows: Tensor  # [S] int64, how many at each step

    @classmethod
    def of(cls, steps: Sequence[TttStep], batch: PackedBatch, num_steps: int) -> CountedRows:
        outs = [s.out if s.counted is None else s.out[s.counted] for s in steps]
        index = [s.index if s.counted is None else s.index[s.counted] for s in steps]
        rows = torch.tensor([len(entry) for entry in index], device=batch.rows.device)
        rows = nn.functional.pad(rows, (0, num_steps - len(rows)))
        step = torch.arange(num_steps, device=rows.device).repeat_interleave(rows)
        label = torch.cat([batch.label0[entry] for entry in index]) + step
        return cls(torch.cat(outs), step, label, rows)


def step_weights(counts: Tensor, decay: float) -> Tensor:
    """Return the weight of a row at each step [S] float32, from the rows counted in the whole window [S]."""
    return (decay ** torch.arange(len(counts), device=counts.device) / counts.clamp(min=1)).float()


def nothing_counted(module: nn.Module, num_steps: int, device: torch.device) -> StepResult:
    """Return a zero loss with a zero gradient for every parameter, so that no other process waits."""
    loss = torch.zeros((), device=device)
    for parameter in module.parameters():
        loss = loss + parameter.flatten()[:0].sum()
    none = torch.zeros(num_steps, dtype=torch.int64, device=device)
    return StepResult(loss, torch.zeros(num_steps, device=device), none, none.clone())


def per_step(values: Tensor, step: Tensor, num_steps: int) -> Tensor:
    """Sum values [R] over the rows of each step, `step` [R] int64 -> [S]."""
    return torch.zeros(num_steps, dtype=values.dtype, device=values.device).index_add_(0, step, values)
