"""Lookahead decoding: n-grams made by Jacobi iteration in the target's own forward, checked when they fit.

Source: Fu et al. 2024, Break the Sequential Dependency of LLM Inference (arXiv 2402.02057), section 3.

The window holds `level` - 1 rows of `window` tokens. Row 0 begins with the tree's root, x[b], and its
column i stands at position b + i; row j's column i follows row j-1's, at position b + i + j. So the window is
a tree: a token sees the text, row 0 up to its own column, and its column's tokens below it. What the target
says after the last row is a new row on top; a column with its new token is an n-gram of `level` tokens. Then
row 0 is dropped, and with it the columns that the text has meanwhile overtaken.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict

import torch

from eagle_train.decoding.reader import Rows
from eagle_train.decoding.sampling import Chance
from eagle_train.decoding.shapes import MOST_NODES, check_size
from eagle_train.decoding.trees import Tree
from eagle_train.targets.load import Target

Gram = tuple[int, ...]


class Lookahead:
    """Drafts with the n-grams of its pool that begin with the root; its window rides in the same forward.

    `window` is W, `level` is N, the length of an n-gram, `guesses` is G, the n-grams kept and verified per
    first token (the latest found). The target's output is read by argmax, whatever the sampling: guesses are
    then no samples of a law that verification could use, so they stand by the target's law alone.
    """

    layer_ids: tuple[int, ...] = ()

    def __init__(self, target: Target, window: int = 7, level: int = 4, guesses: int = 7) -> None:
        for name, value, least in (("window", window, 2), ("level", level, 2), ("guesses", guesses, 1)):
            check_size(f"lookahead: got {name} {{}}", value, least)
        rows = (window + guesses) * (level - 1)
        words = f"lookahead: window {window}, level {level} and {guesses} guesses make {{}} rows a round"
        check_size(words, rows, most=MOST_NODES)
        self.target, self.window, self.level, self.guesses = target, window, level, guesses

    @property
    def figures(self) -> dict[str, object]:
        """How reports name it. `nodes` counts the root, all guesses and the window."""
        own = self.window * (self.level - 1) - 1
        sizes = {"window": self.window, "level": self.level, "guesses": self.guesses}
        depth = self.level - 1
        return {"draft": "lookahead", "nodes": 1 + self.guesses * depth + own, "depth": depth, **sizes}

    def begin(self, chance: Chance) -> None:
        """Forget the text and the n-grams."""
        self._text: list[int] = []
        self._rows: list[list[int]] = []  # the window, oldest row first; row 0's column 0 is the root
        self._pool: dict[int, OrderedDict[Gram, None]] = defaultdict(OrderedDict)

    def observe(self, rows: Rows) -> None:
        """Take in new tokens; with them the target's outputs over the window, from which it moves on."""
        self._text[rows.start :] = rows.tokens.tolist()
        if rows.own is not None:
            self._move_on(self._outputs(rows), accepted=len(rows.tokens) - 2)

    def propose(self) -> Tree:
        """Return the n-grams that fit, as a tree of shared beginnings, and the window behind them."""
        if not self._rows:  # at first any tokens will do: those of the text, over and over
            self._rows = [self._filling(self.window, row) for row in range(self.level - 1)]
        self._rows[0][0] = root = self._text[-1]
        tokens, parents = [root], [-1]
        nodes: dict[Gram, int] = {(): 0}
        for gram in reversed(self._pool[root]):  # the latest first
            for length in range(1, len(gram) + 1):
                if gram[:length] not in nodes:
                    nodes[gram[:length]] = len(tokens)
                    tokens.append(gram[length - 1])
                    parents.append(nodes[gram[: length - 1]])
        guesses = len(tokens)
        below = [0, *range(guesses, guesses + self.window - 1)]  # node of each column in the row before
        tokens += self._rows[0][1:]
        parents += below[:-1]
        for row in self._rows[1:]:
            parents += below
            below = list(range(len(tokens), len(tokens) + self.window))
            tokens += row
        return Tree(tuple(tokens), tuple(parents), own=len(tokens) - guesses)

    def _outputs(self, rows: Rows) -> list[int]:
        """Return the target's choice after every column of the window's last row."""
        assert rows.own is not None
        states = torch.cat([rows.last[:1], rows.own])[-self.window :]  # the root heads row 0
        return self.target.logits(states).argmax(-1).tolist()

    def _move_on(self, new: list[int], accepted: int) -> None:
        """Pool every column's n-gram, drop row 0 and `accepted` columns, fill up on the right."""
        for column, last in enumerate(new):
            first, *rest = (*(row[column] for row in self._rows), last)
            pool = self._pool[first]
            pool.pop(tuple(rest), None)
            pool[tuple(rest)] = None
            if len(pool) > self.guesses:
                pool.popitem(last=False)
        rows = [*self._rows[1:], new]
        gone = min(accepted, self.window)
        self._rows = [[*row[gone:], *self._filling(gone, number)] for number, row in enumerate(rows)]

    def _filling(self, count: int, row: int) -> list[int]:
        """Return `count` tokens of the text, other ones for every row."""
        return [self._text[-1 - (row * self.window + i) % len(self._text)] for i in range(count)]
