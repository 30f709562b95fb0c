"""The target reading the trees of several texts in one forward.

Shapes: B texts in use, n nodes of the largest tree, C columns of the cache (batch_cache.py).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from eagle_train.decoding.batch_cache import BatchCache
from eagle_train.decoding.cache import masks
from eagle_train.decoding.reader import Rows, Tapped, TargetReader, kept_rows
from eagle_train.decoding.trees import Tree
from eagle_train.targets.capture import Captured
from eagle_train.targets.lengths import longest_text
from eagle_train.targets.load import Target


class BatchReader(Tapped):
    """Up to `most` texts being read by the target, each as `TargetReader` reads one."""

    def __init__(self, target: Target, layer_ids: Sequence[int], most: int) -> None:
        super().__init__(target, layer_ids)
        self.cache = BatchCache(most)

    def join(self, alone: TargetReader) -> None:
        """Go on with a text that was read alone, as the last one."""
        self.cache.join(alone.cache)

    def leave(self, text: int) -> None:
        """Forget a text; the last one takes its place."""
        self.cache.leave(text)

    def read_trees(self, trees: Sequence[Tree]) -> list[Captured]:
        """Read every text's tree at once; return for each the features [nodes, F] and [nodes, H]."""
        positions, seen, of_columns = self._sight(trees)
        most = positions.shape[1]
        ids = [[*tree.tokens, *[0] * (most - len(tree))] for tree in trees]
        captured = self._tap.forward(
            torch.tensor(ids, device=positions.device),
            position_ids=positions,
            attention_mask=masks(self.target.config, seen, positions, of_columns, self.target.dtype),
            cache=self.cache,
        )
        aux, last = captured.aux, captured.last
        return [
            Captured(None if aux is None else aux[i, : len(tree)], last[i, : len(tree)])
            for i, tree in enumerate(trees)
        ]

    def _sight(self, trees: Sequence[Tree]) -> tuple[Tensor, Tensor, Tensor]:
        """Return the nodes' positions [B, n], what they see bool [B, n, C], the columns' positions [B, C].

        A filled-up node stands at its tree's root and sees its text alone; nobody sees it.
        """
        device, lengths = self.target.device, self.cache.lengths
        most = max(map(len, trees))
        depths = torch.tensor([[*tree.depths, *[0] * (most - len(tree))] for tree in trees], device=device)
        starts = torch.tensor(lengths, device=device)[:, None]
        positions = starts + depths
        if (longest := longest_text(self.target.config)) is not None:
            positions = positions.clamp_max(longest - 1)  # as in TargetReader.read_tree
        columns = torch.arange(max(lengths) + most, device=device).expand(len(trees), -1)
        seen = (columns < starts)[:, None].repeat(1, most, 1)
        of_columns = columns.clone()
        for i, (tree, start) in enumerate(zip(trees, lengths, strict=True)):
            own = slice(start, start + len(tree))
            seen[i, : len(tree), own] = tree.sees.to(device)
            of_columns[i, own] = positions[i, : len(tree)]
        return positions, seen, of_columns

    def keep(
        self,
        trees: Sequence[Tree],
        paths: Sequence[Sequence[int]],
        tokens: Sequence[int],
        captured: Sequence[Captured],
    ) -> list[Rows]:
        """Keep each tree's root and accepted path, as `TargetReader.keep` does for one."""
        starts = list(self.cache.lengths)
        self.cache.keep([[0, *path] for path in paths])
        kept = zip(starts, trees, paths, tokens, captured, strict=True)
        return [kept_rows(*one, self.target.device) for one in kept]
