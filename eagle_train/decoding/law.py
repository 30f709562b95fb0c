"""The target's law after each node of the trees that it has just read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from eagle_train.decoding.processors import own_processors
from eagle_train.decoding.sampling import Sampling, distribution, processed
from eagle_train.decoding.trees import Tree
from eagle_train.targets.load import Target

MOST_AT_ONCE = 8  # rows of the output map that a CPU runs in about the time of one or two


class TargetLaw:
    """Runs the output map where verification asks, on what the text up to a node makes of it.

    `text` are all tokens so far, the tree's root last; `last` [n, H] are the final states after the nodes.
    The answer began at token `begun` of the text.
    """

    def __init__(
        self,
        target: Target,
        sampling: Sampling,
        text: Sequence[int],
        tree: Tree,
        last: Tensor,
        begun: int = 0,
    ) -> None:
        self._target, self._sampling, self._text, self._tree, self._last = target, sampling, text, tree, last
        self._begun = begun

    def __call__(self, node: int) -> Tensor:
        """Return the law p [V] of the token after `node`: after penalty, temperature, top-k and top-p."""
        return distribution(self._logits(node), self._sampling)

    def best(self, node: int) -> int:
        """Return the target's own greedy token after `node`."""
        if self._sampling.reads_text or not self._at_once:
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
        if not self._sampling.reads_text:
            return logits
        return processed(logits, [*self._text, *self._tree.words(node)], self._sampling, self._begun)


class LawsTogether:
    """The same for the trees of several texts, asked at one node of each at a time.

    Few rows are run through the output map at once, as on a GPU all are; else only those that are asked for.
    """

    def __init__(
        self,
        target: Target,
        sampling: Sampling,
        texts: Sequence[Sequence[int]],
        trees: Sequence[Tree],
        lasts: Sequence[Tensor],
        begun: Sequence[int],
    ) -> None:
        self._target, self._sampling, self._texts, self._trees = target, sampling, texts, trees
        self._lasts, self._begun = lasts, begun  # each [n, H]; where each answer began
        self._starts = [0, *accumulate(map(len, lasts))]  # of each tree in `_all`

    def __call__(self, asked: dict[int, int]) -> dict[int, Any]:
        """Return what follows each asked node, by text: when greedy the best token, else the law p [V]."""
        sampling = self._sampling
        if sampling.greedy and not sampling.reads_text and self._at_once:
            return {text: self._best_of_all[self._starts[text] + node] for text, node in asked.items()}
        logits = self._logits(asked)  # (k, V)
        if sampling.greedy:
            return dict(zip(asked, logits.argmax(-1).tolist(), strict=True))
        return dict(zip(asked, distribution(logits, sampling), strict=True))

    def _logits(self, asked: dict[int, int]) -> Tensor:
        if self._at_once:
            logits = self._all[[self._starts[text] + node for text, node in asked.items()]]
        else:
            rows = torch.stack([self._lasts[text][node] for text, node in asked.items()])
            logits = logits_of_rows(self._target, rows)
        if not self._sampling.reads_text:
            return logits
        changed = []
        for row, (text, node) in zip(logits, asked.items(), strict=True):
            words = [*self._texts[text], *self._trees[text].words(node)]
            changed.append(processed(row, words, self._sampling, self._begun[text]))
        return torch.stack(changed)

    @property
    def _at_once(self) -> bool:
        return self._lasts[0].device.type != "cpu" or self._starts[-1] <= MOST_AT_ONCE

    @cached_property
    def _all(self) -> Tensor:
        return logits_of_rows(self._target, torch.cat(list(self._lasts)))

    @cached_property
    def _best_of_all(self) -> list[int]:
        return self._all.argmax(-1).tolist()


def own_law(target: Target, sampling: Sampling) -> Sampling:
    """Return `sampling` with the processors that the target's generation_config sets.

    A repetition penalty asked for takes the place of the target's. Raises UserError for what no tree can
    honour.
    """
    given = getattr(target.model, "generation_config", None)
    own = own_processors(given, target.eos_ids, target.name, target.vocab_size)
    if own is not None and sampling.repetition_penalty != 1:
        own.values.pop("repetition_penalty", None)
    return replace(sampling, processors=own)


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
