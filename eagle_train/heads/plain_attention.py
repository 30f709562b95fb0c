"""One block of attention from plain operations, in blocks of queries: memory stays linear in length.

Products run in the precision of what is given, also under autocast.
"""

from __future__ import annotations

import torch
from torch import Tensor

_SCORES_AT_ONCE = 1 << 24  # elements of a block of scores


def plain_forward(
    q: Tensor, keys: Tensor, values: Tensor, causal: bool, scale: float
) -> tuple[Tensor, Tensor]:
    """Return the output [C, heads, hd] and the log-sum-exp of the scaled scores [C, heads]."""
    keys, values = per_query_head(keys, q), per_query_head(values, q)
    outs, lses = [], []
    with torch.autocast(q.device.type, enabled=False):
        for first, last in _spans(q, keys):
            scores = _scores(q[first:last], keys, first, causal, scale)
            lse = scores.logsumexp(-1)  # [heads, c]
            outs.append(torch.einsum("hck,khd->chd", (scores - lse[..., None]).exp(), values))
            lses.append(lse.T)
    return torch.cat(outs), torch.cat(lses)


def plain_backward(
    gradient: Tensor,
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    out: Tensor,
    lse: Tensor,
    causal: bool,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return this block's share of the gradients of q, keys and values."""
    kv_heads = keys.shape[1]
    keys, values = per_query_head(keys, q), per_query_head(values, q)
    dq, dkeys, dvalues = torch.empty_like(q), torch.zeros_like(keys), torch.zeros_like(values)
    delta = (gradient * out).sum(-1)  # [C, heads]
    with torch.autocast(q.device.type, enabled=False):
        for first, last in _spans(q, keys):
            at = slice(first, last)
            scores = _scores(q[at], keys, first, causal, scale)
            weights = (scores - lse[at].T[..., None]).exp()  # [heads, c, K]
            dvalues += torch.einsum("hck,chd->khd", weights, gradient[at])
            dweights = torch.einsum("chd,khd->hck", gradient[at], values)
            dscores = weights * (dweights - delta[at].T[..., None]) * scale
            dq[at] = torch.einsum("hck,khd->chd", dscores, keys)
            dkeys += torch.einsum("hck,chd->khd", dscores, q[at])
    return dq, per_key_head(dkeys, kv_heads), per_key_head(dvalues, kv_heads)


def _spans(q: Tensor, keys: Tensor) -> list[tuple[int, int]]:
    size = max(1, _SCORES_AT_ONCE // max(1, len(keys) * q.shape[1]))
    return [(first, min(first + size, len(q))) for first in range(0, len(q), size)]


def per_query_head(x: Tensor, q: Tensor) -> Tensor:
    """Repeat keys or values [K, kv heads, hd] for the query heads that share each."""
    return x.repeat_interleave(q.shape[1] // x.shape[1], dim=1)


def per_key_head(x: Tensor, kv_heads: int) -> Tensor:
    """Sum the gradients of one key head over the query heads that share it."""
    return x if x.shape[1] == kv_heads else x.unflatten(1, (kv_heads, -1)).sum(2)


def _scores(q: Tensor, keys: Tensor, first: int, causal: bool, scale: float) -> Tensor:
    """Scaled scores [heads, c, K] of queries first.., minus infinity where the mask forbids."""
    scores = torch.einsum("chd,khd->hck", q, keys) * scale
    if causal:
        row = torch.arange(first, first + len(q), device=q.device)[:, None]
        scores.masked_fill_(torch.arange(len(keys), device=q.device) > row, float("-inf"))
    return scores
