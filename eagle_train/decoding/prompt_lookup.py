"""Guesses copied from the text itself: what followed the last few tokens when they stood there before.

Source: Prompt Lookup Decoding (Saxena, 2023); LLMA (arXiv 2304.04487).
"""

from __future__ import annotations

from eagle_train.decoding.reader import Rows
from eagle_train.decoding.sampling import Chance
from eagle_train.decoding.shapes import check_size
from eagle_train.decoding.trees import Tree


class PromptLookup:
    """Finds the longest ending of the text, up to `longest` tokens, that occurred before; the latest counts.

    Up to `gamma` tokens that followed it there are the guesses, none where nothing is found.
    """

    layer_ids: tuple[int, ...] = ()

    def __init__(self, gamma: int = 8, longest: int = 3) -> None:
        for name, value in (("gamma", gamma), ("longest", longest)):
            check_size(f"prompt-lookup: got {name} {{}}", value)
        self.gamma, self.longest = gamma, longest

    @property
    def figures(self) -> dict[str, object]:
        """How reports name it. `nodes` counts the root."""
        return {
            "draft": "prompt-lookup",
            "nodes": self.gamma + 1,
            "depth": self.gamma,
            "longest": self.longest,
        }

    def begin(self, chance: Chance) -> None:
        """Forget the text."""
        self._text: list[int] = []
        self._ends: dict[tuple[int, ...], int] = {}  # n-gram -> where its latest occurrence ends

    def observe(self, rows: Rows) -> None:
        """Take in new tokens; of those before the last one every n-gram is noted."""
        new = rows.tokens.tolist() if not self._text else rows.tokens[1:].tolist()
        for token in new:
            for n in range(1, min(self.longest, len(self._text)) + 1):
                self._ends[tuple(self._text[-n:])] = len(self._text)
            self._text.append(token)

    def propose(self) -> Tree:
        """Return the chain of tokens that followed."""
        guesses: list[int] = []
        for n in range(min(self.longest, len(self._text)), 0, -1):
            end = self._ends.get(tuple(self._text[-n:]))
            if end is not None:
                guesses = self._text[end : end + self.gamma]
                break
        return Tree((self._text[-1], *guesses), tuple(range(-1, len(guesses))))
