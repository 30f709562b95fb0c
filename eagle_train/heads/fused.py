"""One block of attention by the platform's own fused kernel, with the log-sum-exp that merging needs.

On a CPU that is the flash kernel behind scaled_dot_product_attention. It runs in float32: in bfloat16
its backward is slower and no kernel of either kind is limited by memory there. On a GPU it is the flash or
the memory-efficient kernel (fused_cuda.py). Elsewhere the same is computed from plain operations.
"""

from __future__ import annotations

import torch
from torch import Tensor

from eagle_train.heads import fused_cuda
from eagle_train.heads.plain_attention import plain_backward, plain_forward
from eagle_train.heads.precision import wide

_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_flash_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


def block_forward(
    q: Tensor, keys: Tensor, values: Tensor, causal: bool, scale: float
) -> tuple[Tensor, Tensor]:
    """Attend queries [C, heads, hd] to keys [K, kv heads, hd]; with `causal` K = C and row c sees keys 0..c.

    Returns the output [C, heads, hd] and the log-sum-exp of the scaled scores [C, heads], in float32 (or
    wider, as given).
    """
    if fused_cuda.takes(q):
        return fused_cuda.forward(q, keys, values, causal, scale)
    q, keys, values = wide(q), wide(keys), wide(values)
    if q.device.type != "cpu":
        return plain_forward(q, keys, values, causal, scale)
    out, lse = _flash(_batched(q), _batched(keys), _batched(values), 0.0, causal, scale=scale)
    return out[0].transpose(0, 1), lse[0].transpose(0, 1)


def block_backward(
    gradient: Tensor,
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    out: Tensor,
    lse: Tensor,
    causal: bool,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return this block's share of the gradients of q, keys and values.

    `out` and `lse` are those of the whole attention, of which this block's keys are a part.
    """
    if fused_cuda.takes(q):
        return fused_cuda.backward(gradient, q, keys, values, out, lse, causal, scale)
    gradient, q, keys, values, out = (wide(x) for x in (gradient, q, keys, values, out))
    if q.device.type != "cpu":
        return plain_backward(gradient, q, keys, values, out, lse, causal, scale)
    found = _flash_backward(
        *(_batched(x) for x in (gradient, q, keys, values, out)),
        lse.transpose(0, 1)[None],
        0.0,
        causal,
        scale=scale,
    )
    dq, dkeys, dvalues = (x[0].transpose(0, 1) for x in found)
    return dq, dkeys, dvalues


def _batched(x: Tensor) -> Tensor:
    return x.transpose(0, 1)[None]  # [C, heads, hd] -> [1, heads, C, hd]
