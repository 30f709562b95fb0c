"""One block of attention by the platform's own fused kernel, with the log-sum-exp that merging needs.

On a CPU that is the flash kernel behind scaled_dot_product_attention. It runs in float32: in bfloat16
its backward is slower and no kernel of either kind is limited by memory there. Elsewhere the same is
computed in blocks of queries from plain operations, of a size that keeps memory linear in length.
"""

from __future__ import annotations

import torch
from torch import Tensor

from eagle_train.heads.precision import wide

_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_flash_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
_SCORES_AT_ONCE = 1 << 24  # elements of a block of scores in the portable path


def block_forward(
    q: Tensor, keys: Tensor, values: Tensor, causal: bool, scale: float
) -> tuple[Tensor, Tensor]:
    """Attend queries [C, heads, hd] to keys [K, kv heads, hd]; with `causal` K = C and row c sees keys 0..c.

    Returns the output [C, heads, hd] and the log-sum-exp of the scaled scores [C, heads], in float32 (or
    wider, as given).
    """
    q, keys, values = wide(q), wide(keys), wide(values)
    if q.device.type != "cpu":
        return _portable_forward(q, keys, values, causal, scale)
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
    gradient, q, keys, values, out = (wide(x) for x in (gradient, q, keys, values, out))
    if q.device.type != "cpu":
        return _portable_backward(gradient, q, keys, values, out, lse, causal, scale)
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


def _portable_forward(
    q: Tensor, keys: Tensor, values: Tensor, causal: bool, scale: float
) -> tuple[Tensor, Tensor]:
    keys, values = _per_query_head(keys, q), _per_query_head(values, q)
    outs, lses = [], []
    for first, last in _spans(q, keys):
        scores = _scores(q[first:last], keys, first, causal, scale)
        lse = scores.logsumexp(-1)  # [heads, c]
        outs.append(torch.einsum("hck,khd->chd", (scores - lse[..., None]).exp(), values))
        lses.append(lse.T)
    return torch.cat(outs), torch.cat(lses)


def _portable_backward(
    gradient: Tensor,
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    out: Tensor,
    lse: Tensor,
    causal: bool,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    kv_heads = keys.shape[1]
    keys, values = _per_query_head(keys, q), _per_query_head(values, q)
    dq, dkeys, dvalues = torch.empty_like(q), torch.zeros_like(keys), torch.zeros_like(values)
    delta = (gradient * out).sum(-1)  # [C, heads]
    for first, last in _spans(q, keys):
        at = slice(first, last)
        weights = (_scores(q[at], keys, first, causal, scale) - lse[at].T[..., None]).exp()  # [heads, c, K]
        dvalues += torch.einsum("hck,chd->khd", weights, gradient[at])
        dweights = torch.einsum("chd,khd->hck", gradient[at], values)
        dscores = weights * (dweights - delta[at].T[..., None]) * scale
        dq[at] = torch.einsum("hck,khd->chd", dscores, keys)
        dkeys += torch.einsum("hck,chd->khd", dscores, q[at])
    return dq, _per_key_head(dkeys, kv_heads), _per_key_head(dvalues, kv_heads)


def _spans(q: Tensor, keys: Tensor) -> list[tuple[int, int]]:
    size = max(1, _SCORES_AT_ONCE // max(1, len(keys) * q.shape[1]))
    return [(first, min(first + size, len(q))) for first in range(0, len(q), size)]


def _per_query_head(x: Tensor, q: Tensor) -> Tensor:
    return x.repeat_interleave(q.shape[1] // x.shape[1], dim=1)


def _per_key_head(x: Tensor, kv_heads: int) -> Tensor:
    """Sum the gradients of one key head over the query heads that share it."""
    return x if x.shape[1] == kv_heads else x.unflatten(1, (kv_heads, -1)).sum(2)


def _scores(q: Tensor, keys: Tensor, first: int, causal: bool, scale: float) -> Tensor:
    """Scaled scores [heads, c, K] of queries first.., minus infinity where the mask forbids."""
    scores = torch.einsum("chd,khd->hck", q, keys) * scale
    if causal:
        row = torch.arange(first, first + len(q), device=q.device)[:, None]
        scores.masked_fill_(torch.arange(len(keys), device=q.device) > row, float("-inf"))
    return scores
