"""A drafter that remembers its most successful round, for a picture of it."""

from __future__ import annotations

from typing import Any

from eagle_train.decoding.drafters import Drafter
from eagle_train.decoding.reader import Rows
from eagle_train.decoding.sampling import Chance
from eagle_train.decoding.trees import Tree


class Watched:
    """Passes everything on to `drafter`."""

    def __init__(self, drafter: Drafter) -> None:
        self._drafter, self.layer_ids = drafter, drafter.layer_ids
        self._tree: Tree | None = None
        self._best: tuple[Tree, list[int]] | None = None

    def begin(self, chance: Chance) -> None:
        """A new text starts."""
        self._tree = None
        self._drafter.begin(chance)

    def observe(self, rows: Rows) -> None:
        """Find the nodes that stood by the tokens that follow the root."""
        if self._tree is not None:
            path, tokens = [0], rows.tokens.tolist()[1:-1]
            for token in tokens:
                path.append(next(c for c in self._tree.children[path[-1]] if self._tree.tokens[c] == token))
            self.note(self._tree, path[1:])
        self._drafter.observe(rows)

    def note(self, tree: Tree, stood: list[int]) -> None:
        """Remember a round, with the nodes that stood, where it is the most successful so far."""
        if self._best is None or len(stood) > len(self._best[1]):
            self._best = tree, stood

    def propose(self) -> Tree:
        """Remember the tree."""
        self._tree = self._drafter.propose()
        return self._tree

    def a_round(self, tokenizer: Any) -> dict[str, Any] | None:
        """Return the guesses of the round in which most stood: words, parents, nodes that stood."""
        if self._best is None:
            return None
        tree, stood = self._best
        guesses = len(tree) - tree.own
        words = [tokenizer.decode([token]) for token in tree.tokens[:guesses]]
        return {"words": words, "parents": list(tree.parents[:guesses]), "accepted": stood}
