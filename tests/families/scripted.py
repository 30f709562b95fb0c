"""A drafter that knows the text, and hides it in trees behind wrong guesses."""

from __future__ import annotations

from collections.abc import Sequence

from eagle_train.decoding.reader import Rows
from eagle_train.decoding.sampling import Chance
from eagle_train.decoding.trees import Tree

_PARENTS = (-1, 0, 0, 1, 2, 2, 5, 5)  # the branch of nodes 2, 5, 7 is the last at every depth
_TRUE = {2: 1, 5: 2, 7: 3}  # node -> its depth


class Scripted:
    """Of three rounds one is all wrong, one right to depth 2, one right to depth 3."""

    def __init__(self, text: Sequence[int], layer_ids: tuple[int, ...], vocabulary: int = 300) -> None:
        self.text, self.layer_ids, self.vocabulary = list(text), layer_ids, vocabulary
        self.observed: list[Rows] = []

    def begin(self, chance: Chance) -> None:
        self.read, self.rounds = 0, 0

    def observe(self, rows: Rows) -> None:
        assert rows.start == self.read
        self.read += len(rows.last)
        self.root = int(rows.tokens[-1])
        self.observed.append(rows)

    def propose(self) -> Tree:
        right = (3, 0, 2)[self.rounds % 3]
        self.rounds += 1
        tokens = [self.root]
        for node in range(1, len(_PARENTS)):
            depth = _TRUE.get(node, 0)
            at = self.read + depth  # text[read] is the root
            true = self.text[at] if at < len(self.text) else 0
            tokens.append(true if 0 < depth <= right else (true + 7 * node) % self.vocabulary)
        return Tree(tuple(tokens), _PARENTS)
