"""EAGLE-1's loss on features."""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional


def smooth_l1_rows(predicted: Tensor, wanted: Tensor) -> Tensor:
    """Return SmoothL1 (beta 1) of each row, the mean over H: [.., H], [.., H] -> [..] float32.

    Source: EAGLE (arXiv 2401.15077), section 3.2.
    """
    return functional.smooth_l1_loss(predicted.float(), wanted.float(), reduction="none").mean(-1)
