"""RMSNorm, computed in float32 whatever its input is, with a gradient that keeps one number per row."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from eagle_train.heads.precision import wide


class RMSNorm(nn.Module):
    """x / rms(x) * weight over the last dimension, returned in x's dtype. Source: arXiv 1910.07467."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return _Normed.apply(x, self.weight, self.eps)


class _Normed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        wider = wide(x)
        inverse = torch.linalg.vector_norm(wider, dim=-1, keepdim=True).square_().div_(x.shape[-1])
        inverse = inverse.add_(eps).rsqrt_()  # [.., 1], 1 / rms
        ctx.save_for_backward(x, weight, inverse)
        return (wider * inverse).mul_(weight).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor, None]:  # type: ignore[override]
        x, weight, inverse = ctx.saved_tensors
        gradient = wide(gradient)
        normed = wide(x) * inverse
        along = gradient * normed
        dweight = along.flatten(0, -2).sum(0).to(weight.dtype)
        if not ctx.needs_input_grad[0]:
            return None, dweight, None
        shared = along.mul_(weight).mean(-1, keepdim=True)
        dx = torch.mul(gradient, weight, out=along).addcmul_(normed, shared, value=-1).mul_(inverse)
        return dx.to(x.dtype), dweight, None
