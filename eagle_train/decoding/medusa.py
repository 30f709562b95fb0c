"""Guesses of Medusa heads: a static tree whose levels are the heads' best tokens, none depending on another.

Source: Medusa (arXiv 2401.10774), sections 2.1.2 and 2.3.3.
"""

from __future__ import annotations

import torch

from eagle_train.decoding.drafters import check_fit
from eagle_train.decoding.reader import Rows
from eagle_train.decoding.sampling import Chance
from eagle_train.decoding.shapes import Chain, Shape, Static
from eagle_train.decoding.trees import StaticShape, Tree, best_paths
from eagle_train.errors import UserError
from eagle_train.heads.config import HeadConfig
from eagle_train.heads.medusa import MedusaHead
from eagle_train.targets.load import Target

_GUESSES = 63  # of the usual tree, as in the paper
_RANKS = 10


def usual_tree(num_heads: int) -> Static:
    """Return the tree of 63 guesses that is best where a head's guesses get rarer with depth and rank."""
    rates = [[0.6 * 0.8**depth / (rank + 1) ** 1.5 for rank in range(_RANKS)] for depth in range(num_heads)]
    return Static(best_paths(rates, _GUESSES))


def static_shape(config: HeadConfig, shape: Shape) -> StaticShape:
    """Return the tree of a chain or a static tree. Raises UserError for what the heads cannot draft."""
    if isinstance(shape, Chain) and not shape.stop:
        static = StaticShape.chain(shape.gamma)
    elif isinstance(shape, Static):
        static = StaticShape.from_paths(shape.paths)
    else:
        raise UserError(f"a {shape.figures['draft']} draft: Medusa heads draft a chain or a static tree")
    deepest, widest = max(static.depths), max(static.ranks) + 1
    if deepest > config.medusa_heads or widest > config.draft_vocab_size:
        raise UserError(
            f"a draft of depth {deepest} and {widest} ranks: the head has {config.medusa_heads} "
            f"Medusa heads over {config.draft_vocab_size} tokens; wanted a smaller draft"
        )
    return static


class MedusaDrafter:
    """Drafts a fixed tree: a node at depth d of rank r is head d-1's guess of rank r, whatever its parent.

    The tokens are no samples, so when sampling they stand by the target's law alone (lossless, unlike the
    paper's typical acceptance).
    """

    layer_ids: tuple[int, ...] = ()

    def __init__(self, head: MedusaHead, target: Target, shape: Shape | None = None) -> None:
        check_fit(head, target)
        self.head = head.to(device=target.device, dtype=target.dtype).eval()
        self.frozen = target.frozen()
        shape = shape or usual_tree(head.config.medusa_heads)
        self._static = static_shape(head.config, shape)
        self.shape = shape
        self._deepest, self._widest = max(self._static.depths), max(self._static.ranks) + 1

    def begin(self, chance: Chance) -> None:
        """Nothing is kept from one round to the next."""

    def observe(self, rows: Rows) -> None:
        """Keep the last state, f[b-1], and the root x[b]."""
        self._root, self._last = int(rows.tokens[-1]), rows.last[-1].to(rows.tokens.device)

    def propose(self) -> Tree:
        """Fill the tree with the heads' best tokens."""
        ranked = [  # [heads, ranks] target ids: head i guesses x[b+1+i]
            self.head.target_ids(self._logits(number).topk(self._widest).indices)
            for number in range(self._deepest)
        ]
        best = torch.stack(ranked).tolist()
        shape = self._static
        guesses = (
            best[depth - 1][rank] for depth, rank in zip(shape.depths[1:], shape.ranks[1:], strict=True)
        )
        return Tree((self._root, *guesses), shape.parents)

    def _logits(self, number: int) -> torch.Tensor:
        return self.head.logits(self.head(self._last, number), self.frozen, number)
