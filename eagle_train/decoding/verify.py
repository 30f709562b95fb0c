"""Which guesses stand: the rules that leave the target's law unchanged.

Every rule walks the tree from the root, asks for the target's output at the nodes it reaches and at no other,
and returns the accepted nodes and one more token drawn from the target. The law meant is always the one after
temperature, top-k and top-p, the last token's included.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from eagle_train.decoding.sampling import Chance
from eagle_train.decoding.trees import Tree


def verify_greedy(tree: Tree, best_after: Callable[[int], int]) -> tuple[list[int], int]:
    """Follow the target's own best tokens down the tree.

    `best_after(node)` is the target's best token after reading the node. Returns (accepted nodes from the
    root's child down, the best token after the last of them).
    """
    path, token = [], best_after(0)
    node = _child_with(tree, 0, token)
    while node is not None:
        path.append(node)
        token = best_after(node)
        node = _child_with(tree, node, token)
    return path, token


def _child_with(tree: Tree, node: int, token: int) -> int | None:
    return next((child for child in tree.children[node] if tree.tokens[child] == token), None)


def verify_sampled(tree: Tree, law_after: Callable[[int], Tensor], chance: Chance) -> tuple[list[int], int]:
    """Accept guesses so that the emitted tokens follow the target's law exactly.

    `law_after(node)` is the target's law p [V] of the token after the node. A child x is accepted

    - where the tree does not say how it was drawn: with probability p(x); refused, p(x) becomes 0. Lossless
      for any tree drawn without the randomness used here.
    - where it was drawn from q: with min(1, p(x)/q(x)); refused, p becomes max(0, p - q) and q loses x, both
      renormalised. Lossless when siblings were drawn from q one after the other, without replacement and in
      node order, their number fixed beforehand. With one child this is the rule of speculative sampling
      (Leviathan et al. 2023, Chen et al. 2023); with more, recursive rejection (SpecInfer, EAGLE).

    Returns (accepted nodes from the root's child down, one more token from what is left of p).
    """
    path: list[int] = []
    node = 0
    while True:
        p, q = law_after(node), tree.q[node] if tree.q is not None else None
        for child in tree.children[node]:
            token = tree.tokens[child]
            share = p[token] if q is None else p[token] / q[token]
            if chance.accept(float(share)):
                break
            p, q = _refused(p, q, token)
        else:
            return path, chance.choose(p)
        path.append(child)
        node = child


def _refused(p: Tensor, q: Tensor | None, token: int) -> tuple[Tensor, Tensor | None]:
    """Return p and q as they are once `token` has been refused."""
    if q is None:
        return _scaled(_without(p, token), p), None
    return _scaled((p - q).clamp_min(0), p), _scaled(_without(q, token), q)


def _without(law: Tensor, token: int) -> Tensor:
    law = law.clone()
    law[token] = 0
    return law


def _scaled(weights: Tensor, otherwise: Tensor) -> Tensor:
    """Return weights / sum. No weight left means a refusal of probability 0, seen through rounding only."""
    total = weights.sum()
    return weights / total if total > 0 else otherwise
