"""The target's law after each node of a tree that it has just read."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

from torch import Tensor

from eagle_train.decoding.sampling import Sampling, distribution, penalised
from eagle_train.decoding.trees import Tree
from eagle_train.targets.load import Target


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
        if self._last.device.type == "cpu" or self._sampling.repetition_penalty != 1:
            return int(self._logits(node).argmax())  # the lm_head only where the walk comes by
        return self._best_of_all[node]

    @cached_property
    def _best_of_all(self) -> list[int]:
        return self._target.logits(self._last).argmax(-1).tolist()  # one wait for the device

    def _logits(self, node: int) -> Tensor:
        logits, penalty = self._target.logits(self._last[node]), self._sampling.repetition_penalty
        if penalty == 1:
            return logits
        return penalised(logits, [*self._text, *self._tree.words(node)], penalty)
