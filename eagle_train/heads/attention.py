"""Attention of the training-time test: causal over step-0 keys, plus the keys of a row's own steps.

One softmax runs over both. The causal part is a standard fused attention, so no T x T matrix is ever
held; its result is merged with the few own-row scores by their log-sum-exp. For the gradient the fused
kernel's own backward, given the merged output and log-sum-exp, yields exactly its share, as in ring
attention (arXiv 2310.01889).

Queries come as runs: consecutive rows of one document. A run's keys are two blocks: all rows before
the run (no mask) and the run itself (causal), so queries need not start where the document does.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from eagle_train.heads.fused import block_backward, block_forward
from eagle_train.heads.precision import wide


@dataclass(frozen=True)
class Run:
    """Entries first..last-1 of the queries are packed rows `row`.. of the document starting at `start`."""

    first: int
    last: int
    start: int
    row: int

    def blocks(self) -> list[tuple[slice, bool]]:
        """Return (packed rows of keys, causal): the rows before the run, if any, and the run itself."""
        own = (slice(self.row, self.row + self.last - self.first), True)
        return [(slice(self.start, self.row), False), own] if self.row > self.start else [own]


def find_runs(rows: Tensor, row_starts: Tensor) -> list[Run]:
    """Group ascending packed `rows` [C] into runs of consecutive rows of one document."""
    if not len(rows):
        return []
    rows, row_starts = rows.cpu(), row_starts.cpu()
    document = torch.searchsorted(row_starts, rows, right=True) - 1  # [C]
    breaks = (rows.diff() != 1) | (document.diff() != 0)
    edges = [0, *(breaks.nonzero().flatten() + 1).tolist(), len(rows)]
    starts, firsts = row_starts[document].tolist(), rows.tolist()
    return [Run(first, last, starts[first], firsts[first]) for first, last in pairwise(edges)]


def attend_runs(
    q: Tensor,  # [C, heads, hd]
    keys: Tensor,  # [N, kv heads, hd], of step 0
    values: Tensor,  # [N, kv heads, hd]
    own: list[tuple[Tensor, Tensor]],  # a later step's key and value of each row [C, kv heads, hd]
    runs: list[Run],
) -> Tensor:
    """Return attention outputs [C, heads, hd] in q's dtype, scaled by 1/sqrt(hd)."""
    flat = [tensor for pair in own for tensor in pair]
    return _Attend.apply(runs, q, keys, values, *flat)


class _Attend(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, runs: list[Run], q: Tensor, keys: Tensor, values: Tensor, *own: Tensor) -> Tensor:
        scale = q.shape[-1] ** -0.5
        out, lse = _step0(q, keys, values, runs, scale)  # [C, heads, hd] and [C, heads], float32
        if own:
            out, lse = _merge_own(out, lse, q, own, scale)
        ctx.save_for_backward(q, keys, values, out, lse, *own)
        ctx.runs, ctx.scale = runs, scale
        return out.to(q.dtype)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        q, keys, values, out, lse, *own = ctx.saved_tensors
        gradient = wide(gradient).contiguous()
        dq = torch.empty_like(out)
        dkeys, dvalues = torch.zeros_like(keys, dtype=out.dtype), torch.zeros_like(values, dtype=out.dtype)
        for run in ctx.runs:
            at = slice(run.first, run.last)
            for block, causal in run.blocks():
                part = block_backward(
                    gradient[at], q[at], keys[block], values[block], out[at], lse[at], causal, ctx.scale
                )
                if causal:  # the run's own rows come last
                    dq[at] = part[0] if run.row == run.start else dq[at] + part[0]
                else:
                    dq[at] = part[0]
                dkeys[block] += part[1]
                dvalues[block] += part[2]
        down = _own_backward(gradient, q, out, lse, own, dq, ctx.scale) if own else ()
        return None, dq.to(q.dtype), dkeys.to(keys.dtype), dvalues.to(values.dtype), *down


def _step0(q: Tensor, keys: Tensor, values: Tensor, runs: list[Run], scale: float) -> tuple[Tensor, Tensor]:
    """Attention over step-0 keys alone: output and log-sum-exp, in float32."""
    outs, lses = [wide(q[:0])], [wide(q[:0, :, 0])]
    for run in runs:
        queries = q[run.first : run.last]
        parts = [
            block_forward(queries, keys[block], values[block], causal, scale)
            for block, causal in run.blocks()
        ]
        out, lse = parts[0] if len(parts) == 1 else _merge(*parts[0], *parts[1])
        outs.append(out)
        lses.append(lse)
    return torch.cat(outs), torch.cat(lses)


def _merge(out: Tensor, lse: Tensor, other: Tensor, other_lse: Tensor) -> tuple[Tensor, Tensor]:
    """Join two attentions of the same queries over different keys."""
    total = torch.logaddexp(lse, other_lse)
    weight, other_weight = (lse - total).exp_(), (other_lse - total).exp_()
    return out * weight[..., None] + other * other_weight[..., None], total


def _grouped(x: Tensor, kv_heads: int) -> Tensor:
    return x.unflatten(1, (kv_heads, -1))  # [C, heads, ..] -> [C, kv heads, queries per key, ..]


def _merge_own(
    out: Tensor, lse: Tensor, q: Tensor, own: tuple[Tensor, ...], scale: float
) -> tuple[Tensor, Tensor]:
    kv_heads = own[0].shape[1]
    grouped = _grouped(wide(q), kv_heads)
    scores = [(grouped * key[:, :, None]).sum(-1).flatten(1) * scale for key in own[::2]]  # each [C, heads]
    total = torch.stack([lse, *scores]).logsumexp(0)
    out = out * (lse - total).exp()[..., None]
    for score, value in zip(scores, own[1::2], strict=True):
        weight = _grouped((score - total).exp(), kv_heads)[..., None]
        _grouped(out, kv_heads).addcmul_(weight, wide(value[:, :, None]))
    return out, total


def _own_backward(
    gradient: Tensor, q: Tensor, out: Tensor, lse: Tensor, own: list[Tensor], dq: Tensor, scale: float
) -> list[Tensor]:
    """Add the own-row share to dq and return the gradients of own keys and values, in `own`'s order."""
    kv_heads = own[0].shape[1]
    g, grouped = _grouped(gradient, kv_heads), _grouped(wide(q), kv_heads)
    delta = (g * _grouped(out, kv_heads)).sum(-1)  # [C, kv heads, queries per key]
    found = []
    for key, value in zip(own[::2], own[1::2], strict=True):
        k, v = key[:, :, None], value[:, :, None]
        weight = ((grouped * k).sum(-1) * scale - _grouped(lse, kv_heads)).exp()
        dscore = (weight * ((g * v).sum(-1) - delta) * scale)[..., None]
        _grouped(dq, kv_heads).add_(dscore * k)
        found.append((dscore * grouped).sum(2).to(key.dtype))
        found.append((weight[..., None] * g).sum(2).to(value.dtype))
    return found
