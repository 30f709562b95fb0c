"""The target's law after each node of a tree that it has just read."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import torch
from torch import Tensor

from eagle_train.decoding.sampling import Sampling, distribution, penalised
from eagle_train.decoding.trees import Tree
from eagle_train.targets.load import Target

MOST_AT_ONCE = 8  # rows of the output map that a CPU runs in about the time of one or two


class TargetLaw:
    """Runs the output map where verification asks, on what the text up to a node makes of it.

    `text` are all tokens so far, the tree's root last; `last` [n, H] are the final states after the nodes.
    """

    def __init__(
        self, target: Target, sampling: Sampling, text: Sequence[int], tree: Tree, last: Tensor
    ) -> None:
        self._target, self._sampling, self._text, self._tree, self._last = target, sampling, text, tree, last

    def __call__(self, node: int) -> Tensor:
        """Return the law p [V] of the token after `node`: after penalty, temperature, top-k and top-p."""
        return distribution(self._logits(node), self._sampling)

    def best(self, node: int) -> int:
        """Return the target's own greedy token after `node`."""
        if self._sampling.repetition_penalty != 1 or not self._at_once:
            return int(self._logits(node).argmax())
        return self._best_of_all[node]

    @property
    def _at_once(self) -> bool:
        """True where all nodes cost about as much as one; else the output map runs where the walk comes."""
        return self._last.device.type != "cpu" or len(self._last) <= MOST_AT_ONCE

    @cached_property
    def _all(self) -> Tensor:
        return logits_of_rows(self._target, self._last)  # (n, H) -> (n, V)

    @cached_property
    def _best_of_all(self) -> list[int]:
        return self._all.argmax(-1).tolist()  # one wait for the device

    def _logits(self, node: int) -> Tensor:
        logits = self._all[node] if self._at_once else self._target.logits(self._last[node])
        penalty = self._sampling.repetition_penalty
        if penalty == 1:
            return logits
        return penalised(logits, [*self._text, *self._tree.words(node)], penalty)


def logits_of_rows(target: Target, rows: Tensor) -> Tensor:
    """Return `target.logits(rows)`, [n, V] of [n, H].

    In float32 on a CPU a product of a large matrix and a few rows is several times faster written with the
    matrix first; the sums are the same up to their order.
    """
    head = target.lm_head
    few = 2 <= len(rows) <= MOST_AT_ONCE and rows.dtype == torch.float32
    if not few or type(head) is not torch.nn.Linear or type(head.weight) is not torch.nn.Parameter:
        return target.logits(rows)  # also where the map is quantised
    if not head.weight.device.type == rows.device.type == "cpu":
        return target.logits(rows)
    product = (head.weight @ rows.T).T
    return target.output_map(product if head.bias is None else product + head.bias)
