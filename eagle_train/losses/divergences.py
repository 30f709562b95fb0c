"""How far the head's distribution q is from the target's p: row losses and their gradients by logits.

Each takes a chunk's logits z and q = softmax(z), p, all [c, D], with lse [c] the log-sum-exp of z, and
gives the row losses [c] and leaves d(loss)/dz in `q`; `z` is used up.

cross_entropy   - sum_v p log q; as EAGLE-1 and EAGLE-3 train
kl              sum_v p log(p / q): the same gradient, a loss that is 0 where q = p
reverse_kl      sum_v q log(q / p)
tv              1 - sum_v min(p, q): one minus the chance that a sampled guess is accepted
lk              - log sum_v min(p, q): the logarithm of that chance (LK losses, arXiv 2602.23881)
top_k           cross-entropy with the top tokens of p counted more (HASS, arXiv 2408.15766)
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

_LEAST_ACCEPTANCE = 1e-20  # of a row: its logarithm stays finite
_TINY = 1e-37  # the smallest probability whose logarithm is taken

Divergence = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]  # (z, q, p, lse) -> row losses


def cross_entropy(z: Tensor, q: Tensor, p: Tensor, lse: Tensor) -> Tensor:
    rows = lse - z.mul_(p).sum(-1)
    q.sub_(p)
    return rows


def weighted_cross_entropy(z: Tensor, q: Tensor, p: Tensor, lse: Tensor) -> Tensor:
    """The same for a `p` that does not sum to 1."""
    mass = p.sum(-1)
    rows = lse.mul(mass).sub_(z.mul_(p).sum(-1))
    q.mul_(mass[:, None]).sub_(p)
    return rows


def count_top_more(p: Tensor, k: int, weight: float) -> Tensor:
    """Return p with the `k` most likely tokens of each row times 1 + `weight`."""
    top = p.topk(min(k, p.shape[-1]), dim=-1)
    return p.scatter(-1, top.indices, top.values * (1 + weight))


def kl(z: Tensor, q: Tensor, p: Tensor, lse: Tensor) -> Tensor:
    entropy = -torch.xlogy(p, p).sum(-1)
    return cross_entropy(z, q, p, lse) - entropy


def reverse_kl(z: Tensor, q: Tensor, p: Tensor, lse: Tensor) -> Tensor:
    ratio = z.sub_(lse[:, None]).sub_(p.clamp(min=_TINY).log())  # log(q / p)
    rows = (q * ratio).sum(-1)
    q.mul_(ratio.sub_(rows[:, None]))
    return rows


def tv(z: Tensor, q: Tensor, p: Tensor, lse: Tensor) -> Tensor:
    return 1 - _acceptance(q, p)


def lk(z: Tensor, q: Tensor, p: Tensor, lse: Tensor) -> Tensor:
    accepted = _acceptance(q, p).clamp(min=_LEAST_ACCEPTANCE)
    q.div_(accepted[:, None])
    return -accepted.log()


def _acceptance(q: Tensor, p: Tensor) -> Tensor:
    """Return sum_v min(p, q) [c] and leave minus its derivative in `q`."""
    accepted = torch.minimum(p, q).sum(-1)
    below = (q < p).to(q.dtype)
    share = (q * below).sum(-1, keepdim=True)
    q.mul_(share - below)
    return accepted


DIVERGENCES: dict[str, Divergence] = {
    "cross_entropy": cross_entropy,
    "kl": kl,
    "reverse_kl": reverse_kl,
    "tv": tv,
    "lk": lk,
}
