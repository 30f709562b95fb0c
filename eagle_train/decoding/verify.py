"""Which guesses stand: the rules that leave the target's law unchanged.

Every rule walks the tree from the root, asks for the target's output at the nodes it reaches and at no other,
and returns the accepted nodes and one more token drawn from the target. The law meant is always the one after
temperature, top-k and top-p, the last token's included. The `walk_` functions yield the nodes they ask at, so
that the trees of several texts are walked in step.
"""

from __future__ import annotations

from collections.abc import Callable, Generator

from torch import Tensor

from eagle_train.decoding.asking import answered
from eagle_train.decoding.sampling import Chance, scaled, without
from eagle_train.decoding.trees import Tree

Stood = tuple[list[int], int]
"""The accepted nodes from the root's child down, and the token that follows them."""


def verify_greedy(tree: Tree, best_after: Callable[[int], int]) -> Stood:
    """Follow the target's own best tokens down the tree.

    `best_after(node)` is the target's best token after reading the node. Returns (accepted nodes from the
    root's child down, the best token after the last of them).
    """
    return answered(walk_greedy(tree), best_after)


def walk_greedy(tree: Tree) -> Generator[int, int, Stood]:
    """`verify_greedy`, asking for the best token after each node it comes to."""
    path, token = [], (yield 0)
    node = _child_with(tree, 0, token)
    while node is not None:
        path.append(node)
        token = yield node
        node = _child_with(tree, node, token)
    return path, token


def _child_with(tree: Tree, node: int, token: int) -> int | None:
    return next((child for child in tree.children[node] if tree.tokens[child] == token), None)


def verify_sampled(tree: Tree, law_after: Callable[[int], Tensor], chance: Chance) -> Stood:
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
    return answered(walk_sampled(tree, chance), law_after)


def walk_sampled(tree: Tree, chance: Chance) -> Generator[int, Tensor, Stood]:
    """`verify_sampled`, asking for the law after each node it comes to."""
    path: list[int] = []
    node = 0
    while True:
        p = yield node
        q = _drawn_from(tree, node, p)
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


def _drawn_from(tree: Tree, node: int, p: Tensor) -> Tensor | None:
    """Return the law that the node's children were drawn from, on the device of `p`: GPUs may differ."""
    q = None if tree.q is None else tree.q[node]
    return None if q is None else q.to(p.device)


def _refused(p: Tensor, q: Tensor | None, token: int) -> tuple[Tensor, Tensor | None]:
    """Return p and q as they are once `token` has been refused."""
    if q is None:
        return without(p, token), None
    return scaled(_residual(p, q), p), without(q, token)


def _residual(p: Tensor, q: Tensor, share: float = 1.0) -> Tensor:
    """Return what is left of share * p once q is taken off, not normalised."""
    return (share * p - q).clamp_min(0)


def verify_block(tree: Tree, law_after: Callable[[int], Tensor], chance: Chance) -> Stood:
    """Accept the longest beginning of a chain of samples that may stand; the law stays the target's.

    Node i holds guess x_i, drawn from q_i = tree.q[i-1]; p_i is the target's law there. With P_0 = 1 and
    P_i = min(1, P_{i-1} p_i(x_i) / q_i(x_i)), guesses 1..i stand together with probability
    h_i = R / (R + 1 - P_i), R being the weight of max(0, P_i p_{i+1} - q_{i+1}), and h_gamma = P_gamma; the
    longest that does is kept. Never keeps fewer guesses in expectation than one decision per guess.
    Source: Sun et al. 2024, Block Verification Accelerates Speculative Decoding (arXiv 2403.10444).
    """
    return answered(walk_block(tree, chance), law_after)


def walk_block(tree: Tree, chance: Chance) -> Generator[int, Tensor, Stood]:
    """`verify_block`, asking for the law after every node of the chain."""
    assert tree.q is not None
    assert tree.is_chain, "block verification is for a chain of samples"
    gamma = len(tree) - 1 - tree.own
    p = []  # p[i] is the law of the token after node i
    for node in range(gamma + 1):
        p.append((yield node))
    shares = [1.0]  # P_0 .. P_gamma
    for i in range(gamma):
        q, token = _drawn_from(tree, i, p[i]), tree.tokens[i + 1]
        assert q is not None
        shares.append(min(1.0, shares[i] * float(p[i][token] / q[token])))
    if gamma and chance.accept(shares[gamma]):
        return list(range(1, gamma + 1)), chance.choose(p[gamma])
    for i in range(gamma - 1, 0, -1):
        rest = float(_residual(p[i], _drawn_from(tree, i, p[i]), shares[i]).sum())  # type: ignore[arg-type]
        if chance.accept(1.0 if rest + 1 - shares[i] <= 0 else rest / (rest + 1 - shares[i])):
            return _stop_block(tree, p, shares, i, chance)
    return _stop_block(tree, p, shares, 0, chance)


def _stop_block(tree: Tree, p: list[Tensor], shares: list[float], kept: int, chance: Chance) -> Stood:
    q = _drawn_from(tree, kept, p[kept])
    rest = p[kept] if q is None else scaled(_residual(p[kept], q, shares[kept]), p[kept])
    return list(range(1, kept + 1)), chance.choose(rest)
