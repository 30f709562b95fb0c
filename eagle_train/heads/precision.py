"""The one rule of precision: sums, norms, softmax and log-sum-exp run in float32 or wider."""

from __future__ import annotations

import torch
from torch import Tensor


def wide(x: Tensor) -> Tensor:
    """Return x in float32, or as it is in float64."""
    return x if x.dtype == torch.float64 else x.float()
