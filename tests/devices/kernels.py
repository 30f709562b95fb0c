"""The attention kernels of CUDA by plain arithmetic: same signatures, layouts, refusals and log-sum-exp.

Everything is [batch, heads, rows, head_dim]. Flash works in 16 bits alone; its log-sum-exp is [batch, heads,
rows]. The memory-efficient kernel's comes in multiples of 32 rows. Both sums are float32 and dense.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

_aten = torch.ops.aten
_ALIGNED = 32
_NOT_WRITTEN = float("nan")  # what a caller must not read


def _weights(q: Tensor, keys: Tensor, causal: bool, scale: float | None) -> tuple[Tensor, Tensor]:
    """Return scaled scores [B, h, C, K], minus infinity above the diagonal where causal, and the scale."""
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    scores = q.float() @ keys.float().transpose(-1, -2) * scale
    if causal:
        _require(q.shape[2] == keys.shape[2], "causal attention of unequal lengths")  # kernels differ there
        scores = scores.masked_fill(torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1), float("-inf"))
    return scores, torch.tensor(scale)


def _forward(q: Tensor, keys: Tensor, values: Tensor, causal: bool, scale: Any) -> tuple[Tensor, Tensor]:
    _dense(q, keys, values)
    scores, _ = _weights(q, keys, causal, scale)
    rows = (scores.softmax(-1) @ values.float()).to(q.dtype).transpose(1, 2).contiguous()
    return rows.transpose(1, 2), scores.logsumexp(-1)  # a view of [B, C, h, hd], as the kernels give


def _backward(
    gradient: Tensor,
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    out: Tensor,
    lse: Tensor,
    causal: bool,
    scale: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of this block's keys in an attention whose output and log-sum-exp are `out` and `lse`."""
    _dense(gradient, q, keys, values, out)
    _require(lse.dtype == torch.float32 and lse.is_contiguous(), "log-sum-exp in float32, dense")
    _require(
        out.dtype == gradient.dtype == q.dtype, "query, output and its gradient must have the same dtype"
    )
    scores, scale = _weights(q, keys, causal, scale)
    weights = (scores - lse[..., None]).exp()
    g = gradient.float()
    delta = (g * out.float()).sum(-1, keepdim=True)
    down = weights * (g @ values.float().transpose(-1, -2) - delta) * scale
    found = down @ keys.float(), down.transpose(-1, -2) @ q.float(), weights.transpose(-1, -2) @ g
    return tuple(x.to(q.dtype) for x in found)  # type: ignore[return-value]


def flash(q, keys, values, dropout=0.0, causal=False, debug=False, *, scale=None):
    _require(
        q.dtype in (torch.float16, torch.bfloat16), "FlashAttention only support fp16 and bf16 data type"
    )
    _require(q.shape[-1] % 8 == 0 and q.shape[-1] <= 256, "head dimension: a multiple of 8, at most 256")
    _require(dropout == 0, "no dropout here")
    out, lse = _forward(q, keys, values, causal, scale)
    state = torch.zeros(2, dtype=torch.uint64)
    return out, lse, None, None, q.shape[2], keys.shape[2], state, torch.zeros((), dtype=torch.uint64), q[:0]


def flash_backward(
    gradient,
    q,
    keys,
    values,
    out,
    lse,
    cum_q,
    cum_k,
    max_q,
    max_k,
    dropout,
    causal,
    seed,
    offset,
    *,
    scale=None,
):
    _require(
        q.dtype in (torch.float16, torch.bfloat16), "FlashAttention only support fp16 and bf16 data type"
    )
    _require((max_q, max_k) == (q.shape[2], keys.shape[2]), "the numbers of rows")
    _require(lse.shape == q.shape[:3], "log-sum-exp [batch, heads, rows]")
    return _backward(gradient, q, keys, values, out, lse, causal, scale)


def efficient(q, keys, values, bias, with_lse, dropout=0.0, causal=False, *, scale=None):
    _require(bias is None and dropout == 0, "no bias and no dropout here")
    out, lse = _forward(q, keys, values, causal, scale)
    beyond = -q.shape[2] % _ALIGNED
    lse = torch.nn.functional.pad(lse, (0, beyond), value=_NOT_WRITTEN) if with_lse else lse[..., :0]
    return out, lse, torch.zeros((), dtype=torch.int64), torch.zeros((), dtype=torch.int64)


def efficient_backward(
    gradient, q, keys, values, bias, out, lse, seed, offset, dropout, wanted, causal=False, *, scale=None
):
    rows = q.shape[2]
    _require(
        lse.shape == (*q.shape[:2], rows + -rows % _ALIGNED), f"log-sum-exp in multiples of {_ALIGNED} rows"
    )
    _require(bool(lse[..., rows:].isposinf().all()), "infinity as the log-sum-exp of rows that are not there")
    found = _backward(gradient, q, keys, values, out, lse[..., :rows].contiguous(), causal, scale)
    return *found, None


def _dense(*tensors: Tensor) -> None:
    for tensor in tensors:
        _require(tensor.stride(-1) == 1, "Input tensor must have contiguous last dimension")


def _require(fine: bool, wanted: str) -> None:
    if not fine:
        raise RuntimeError(wanted)


KERNELS = {
    _aten._scaled_dot_product_flash_attention.default: flash,
    _aten._scaled_dot_product_flash_attention_backward.default: flash_backward,
    _aten._scaled_dot_product_efficient_attention.default: efficient,
    _aten._scaled_dot_product_efficient_attention_backward.default: efficient_backward,
}
