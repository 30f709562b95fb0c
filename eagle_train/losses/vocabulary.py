"""Soft cross-entropy against the target over the draft vocabulary, with its gradient in the same pass.

loss[r] = - sum_v p[v] log q[v], p the target's distribution restricted to the draft vocabulary and
renormalised, q the head's. Logits live only for a chunk of rows: while they do, the chunk's loss, its
hits and its gradients are taken, so nothing is recomputed and memory does not grow with R.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from eagle_train.heads.precision import wide

if TYPE_CHECKING:
    from eagle_train.shards.frozen_target import FrozenTarget

_LOGITS_AT_ONCE = 1 << 24  # elements of a chunk: a few tens of megabytes, enough rows for a fast product
_BLOCK = 1 << 19  # elements handled at once by the passes over logits: they should stay in the cache


class VocabularyLoss(NamedTuple):
    loss: Tensor  # scalar, sum over rows of weight * row loss; carries the gradient
    rows: Tensor  # [R] float32, each row's loss, unweighted, detached
    hits: Tensor  # [R] bool, no token is likelier to the head than the target's first choice


def draft_distribution(target: FrozenTarget, last: Tensor) -> Tensor:
    """Return the target's distribution over its output rows, [.., D] float32 or wider, from states [.., H].

    `target` is the frozen target restricted to the draft vocabulary, which renormalises.
    """
    return wide(target.logits(last)).softmax(-1)


def vocabulary_loss(
    hidden: Tensor,  # [R, H], what the head's output map reads
    weight: Tensor,  # [D, H], the head's output map
    target: FrozenTarget,  # restricted to the draft vocabulary
    label_last: Tensor,  # [M, H], the target's final states
    label: Tensor,  # [R] int64, the label of each row, an index into label_last
    best: Tensor,  # [R] int64, the target's first choice as a draft id
    row_weight: Tensor,  # [R] float32
    own_map: bool = True,  # False: the head's logits go through the target's bias, scale and cap (EAGLE-1)
) -> VocabularyLoss:
    """Return the weighted sum of soft cross-entropies, each row's own, and which rows hit.

    Under autocast the products run in its dtype, everything else in float32.
    """
    order = label.argsort(stable=True)  # rows that share a label together: its distribution is made once
    loss, rows, hits = _Loss.apply(
        hidden, weight, target, label_last, label, best, row_weight, order, own_map
    )
    return VocabularyLoss(loss, rows, hits)


class _Loss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        target: FrozenTarget,
        label_last: Tensor,
        label: Tensor,
        best: Tensor,
        row_weight: Tensor,
        order: Tensor,
        own_map: bool,
    ) -> tuple[Tensor, Tensor, Tensor]:
        device = hidden.device.type
        dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else hidden.dtype
        sums = torch.float64 if dtype == torch.float64 else torch.float32
        wants_hidden, wants_weight = ctx.needs_input_grad[:2]
        rows = torch.empty(len(hidden), dtype=sums, device=hidden.device)
        hits = torch.empty(len(hidden), dtype=torch.bool, device=hidden.device)
        dhidden = torch.empty_like(hidden) if wants_hidden else None
        dweight = torch.zeros_like(weight, dtype=sums) if wants_weight else None
        output = weight.to(dtype)
        size = min(max(1, _LOGITS_AT_ONCE // len(weight)), max(1, len(hidden)))
        buffer = torch.empty((size, len(weight)), dtype=dtype, device=hidden.device)  # new memory is slow
        with torch.autocast(device, enabled=False):
            for at in order.split(size):
                inputs = hidden.index_select(0, at).to(dtype)  # [c, H]
                logits = torch.mm(inputs, output.T, out=buffer[: len(at)])  # [c, D], then its gradient
                labels, which = torch.unique_consecutive(label[at], return_inverse=True)
                p = draft_distribution(target, label_last.index_select(0, labels))  # [labels, D]
                rows[at], hits[at] = _blocks(logits, p, which, best[at], None if own_map else target)
                scale = row_weight[at, None]
                if dhidden is not None:
                    dhidden[at] = (logits @ output).to(hidden.dtype).mul_(scale)
                if dweight is not None:
                    _add_product(dweight, logits, (inputs * scale).to(dtype))
        ctx.save_for_backward(dhidden, dweight)
        ctx.weight_dtype = weight.dtype
        ctx.mark_non_differentiable(rows, hits)
        return (rows * row_weight).sum(), rows, hits

    @staticmethod
    def backward(ctx: Any, gradient: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        dhidden, dweight = ctx.saved_tensors
        if dhidden is not None:
            dhidden = dhidden * gradient.to(dhidden.dtype)
        if dweight is not None:
            dweight = (dweight * gradient).to(ctx.weight_dtype)
        return dhidden, dweight, None, None, None, None, None, None, None


def _blocks(
    logits: Tensor, p: Tensor, which: Tensor, best: Tensor, target: FrozenTarget | None
) -> tuple[Tensor, Tensor]:
    """Return row losses and hits of a chunk, and leave d(row loss)/d(product) in `logits`."""
    rows, hits = [], []
    step = max(1, _BLOCK // logits.shape[1])
    for z, index, choice in zip(logits.split(step), which.split(step), best.split(step), strict=True):
        scores, slope = _mapped(z, target)
        wanted = p.index_select(0, index)
        q = scores.softmax(-1)
        top = scores.amax(-1)
        lse = top - q.amax(-1).log()  # the largest probability is never small
        rows.append(lse - torch.linalg.vecdot(wanted, scores))
        hits.append(scores.gather(-1, choice[:, None])[:, 0] == top)
        gradient = q.sub_(wanted)
        z.copy_(gradient if slope is None else gradient.mul_(slope))
    return torch.cat(rows), torch.cat(hits)


def _mapped(product: Tensor, target: FrozenTarget | None) -> tuple[Tensor, Tensor | float | None]:
    """Return wide logits of a product with the output weight, and their derivative where it is not 1."""
    z = wide(product)
    if target is None:
        return z, None
    if target.bias is not None:
        z = z + target.bias
    slope: Tensor | float | None = None
    if target.logit_scale != 1.0:
        z, slope = z * target.logit_scale, target.logit_scale
    if target.softcap is not None:
        bent = torch.tanh(z / target.softcap)
        z, slope = bent * target.softcap, (1 - bent.square()) * (1.0 if slope is None else slope)
    return z, slope


def _add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """total += left.T @ right; in the wide dtype without a temporary."""
    if left.dtype == total.dtype:
        total.addmm_(left.T, right)
    else:
        total += left.T @ right
