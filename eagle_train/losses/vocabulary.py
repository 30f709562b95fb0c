"""The loss over the draft vocabulary, with its gradient in the same pass.

p is the target's distribution restricted to the draft vocabulary and renormalised, q the head's; which
divergence between them is minimised is a choice (divergences.py). Logits live only for a chunk of rows:
while they do, the chunk's loss, its hits and its gradients are taken, so nothing is recomputed and memory
does not grow with R.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from eagle_train.heads.precision import wide
from eagle_train.losses.divergences import DIVERGENCES, Divergence, count_top_more, weighted_cross_entropy
from eagle_train.losses.top_labels import TopLabels

if TYPE_CHECKING:
    from eagle_train.shards.frozen_target import FrozenTarget

_LOGITS_AT_ONCE = 1 << 24  # elements of a chunk: a few tens of megabytes, enough rows for a fast product
_BLOCK = 1 << 18  # elements handled at once by the passes over logits: they should stay in the cache


class VocabularyLoss(NamedTuple):
    loss: Tensor  # scalar, sum over rows of weight * row loss; carries the gradient
    rows: Tensor  # [R] float32, each row's loss, unweighted, detached
    hits: Tensor  # [R] bool, no token is likelier to the head than the target's first choice


def vocabulary_loss(
    hidden: Tensor,  # [R, H], what the head's output map reads
    weight: Tensor,  # [D, H], the head's output map
    target: FrozenTarget,  # restricted to the draft vocabulary
    label_last: Tensor | TopLabels,  # [M, H], the target's final states, or its likeliest tokens
    label: Tensor,  # [R] int64, the label of each row, an index into label_last
    best: Tensor,  # [R] int64, the target's first choice as a draft id
    row_weight: Tensor,  # [R] float32
    own_map: bool = True,  # False: the head's logits go through the target's bias, scale and cap (EAGLE-1)
    divergence: str = "cross_entropy",  # a key of DIVERGENCES
    top_k: tuple[int, float] | None = None,  # with cross-entropy: the k top tokens count 1 + weight times
) -> VocabularyLoss:
    """Return the weighted sum of row losses, each row's own, and which rows hit.

    Under autocast the products run in its dtype, everything else in float32.
    """
    order = label.argsort(stable=True)  # rows that share a label together: its distribution is made once
    loss, rows, hits = _Loss.apply(
        hidden, weight, target, label_last, label, best, row_weight, order, own_map, divergence, top_k
    )
    return VocabularyLoss(loss, rows, hits)


class _Loss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        target: FrozenTarget,
        label_last: Tensor | TopLabels,
        label: Tensor,
        best: Tensor,
        row_weight: Tensor,
        order: Tensor,
        own_map: bool,
        divergence: str,
        top_k: tuple[int, float] | None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        device, num_rows, width = hidden.device, len(hidden), len(weight)
        autocast = torch.is_autocast_enabled(device.type)
        dtype = torch.get_autocast_dtype(device.type) if autocast else hidden.dtype
        sums = torch.float64 if dtype == torch.float64 else torch.float32
        wants_hidden, wants_weight = ctx.needs_input_grad[:2]
        rows = torch.empty(num_rows, dtype=sums, device=device)
        hits = torch.empty(num_rows, dtype=torch.bool, device=device)
        dhidden = torch.empty_like(hidden) if wants_hidden else None
        dweight = torch.zeros_like(weight, dtype=sums) if wants_weight else None
        chunks = max(1, math.ceil(num_rows * width / _LOGITS_AT_ONCE))
        size = max(1, math.ceil(num_rows / chunks))  # rows of a chunk, all chunks alike
        buffer = torch.empty((size, width), dtype=dtype, device=device)  # once: fresh memory is slow
        scratch = torch.empty((3, min(size, max(1, _BLOCK // width)), width), dtype=sums, device=device)
        output = weight.to(dtype)
        assert top_k is None or divergence == "cross_entropy"
        measure = weighted_cross_entropy if top_k else DIVERGENCES[divergence]
        with torch.autocast(device.type, enabled=False):
            for at in order.split(size) if num_rows else ():
                inputs = hidden.index_select(0, at).to(dtype)  # [c, H]
                logits = torch.mm(inputs, output.T, out=buffer[: len(at)])  # [c, D], then its gradient
                labels, which = torch.unique_consecutive(label[at], return_inverse=True)
                if isinstance(label_last, TopLabels):
                    teacher = label_last.logits(labels)  # [labels, D]
                else:
                    teacher = target.logits(label_last.index_select(0, labels))
                through = None if own_map else target
                rows[at], hits[at] = _blocks(
                    logits, teacher, which, best[at], through, scratch, measure, top_k
                )
                scale = row_weight[at, None]
                if dhidden is not None:
                    dhidden.index_copy_(0, at, (logits @ output).mul_(scale).to(hidden.dtype))
                if dweight is not None:
                    _add_product(dweight, logits, (inputs * scale).to(dtype))
        ctx.found = dhidden, None if dweight is None else dweight.to(weight.dtype)
        ctx.mark_non_differentiable(rows, hits)
        return (rows * row_weight).sum(), rows, hits

    @staticmethod
    def backward(ctx: Any, gradient: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        found, ctx.found = ctx.found, None  # handed on, not kept: they are large
        if gradient.device.type != "cpu" or gradient != 1:
            for x in found:
                if x is not None:
                    x.mul_(gradient.to(x.dtype))
        return (*found, *[None] * 9)


def _blocks(
    logits: Tensor,
    teacher: Tensor,
    which: Tensor,
    best: Tensor,
    through: FrozenTarget | None,
    scratch: Tensor,
    measure: Divergence,
    top_k: tuple[int, float] | None,
) -> tuple[Tensor, Tensor]:
    """Return row losses and hits of a chunk, and leave d(row loss)/d(product) in `logits` [c, D].

    `teacher` [labels, D] are the target's logits, `which` [c] each row's label among them, ascending;
    `through` is the output map that the head's logits share with the target, if any.
    """
    rows, hits = [], []
    step = scratch.shape[1]
    for z, index, choice in zip(logits.split(step), which.split(step), best.split(step), strict=True):
        scores, q, wanted = scratch[:, : len(z)]
        slope = _map(scores.copy_(z), through)
        torch.softmax(scores, -1, out=q)
        first, last = int(index[0]), int(index[-1])
        p = wide(teacher[first : last + 1]).softmax(-1)  # of the few labels that these rows share
        if top_k is not None:
            p = count_top_more(p, *top_k)
        torch.index_select(p, 0, index - first, out=wanted)
        top = scores.amax(-1)
        hits.append(scores.gather(-1, choice[:, None])[:, 0] == top)
        lse = top - q.amax(-1).log()  # the largest probability is never small
        rows.append(measure(scores, q, wanted, lse))
        z.copy_(q if slope is None else q.mul_(slope))
    return torch.cat(rows), torch.cat(hits)


def _map(z: Tensor, target: FrozenTarget | None) -> Tensor | float | None:
    """Apply the target's bias, scale and cap to products in place; return the derivative where not 1."""
    slope: Tensor | float | None = None
    if target is None:
        return slope
    if target.bias is not None:
        z += target.bias
    if target.logit_scale != 1.0:
        z *= target.logit_scale
        slope = target.logit_scale
    if target.softcap is not None:
        bent = torch.tanh(z / target.softcap)
        torch.mul(bent, target.softcap, out=z)
        slope = (1 - bent.square()) * (1.0 if slope is None else slope)
    return slope


def _add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """total += left.T @ right; in the wide dtype without a temporary."""
    if left.dtype == total.dtype:
        total.addmm_(left.T, right)
    else:
        total += left.T @ right
