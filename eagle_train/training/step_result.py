"""What one training step hands back, the same for every kind of head."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class StepResult:
    """Legend: S test-time steps (one for EAGLE-1)."""

    loss: Tensor  # scalar; its gradient is that of sum_i weight_i * loss_sums_i / counts_i
    loss_sums: Tensor  # [S] detached, sums over counted rows
    hits: Tensor  # [S] int64, rows whose first choice is the target's
    rows: Tensor  # [S] int64, rows counted


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
