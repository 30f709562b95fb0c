"""Exact laws: every random decision of a function taken both ways, its probabilities multiplied."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable
from pathlib import Path

import pytest
import torch
from torch import Tensor


class Replay:
    """A source of chance that follows a script of outcomes and notes the alternatives it did not take."""

    def __init__(self, script: tuple[int, ...]) -> None:
        self.script, self.taken, self.open = script, (), []
        self.probability = torch.ones((), dtype=torch.float64)

    def _decide(self, law: Tensor) -> int:
        law = law.double()
        possible = law.nonzero().flatten().tolist()
        if len(self.taken) < len(self.script):
            outcome = self.script[len(self.taken)]
        else:
            outcome, *others = possible
            self.open += [(*self.taken, other) for other in others]
        self.taken = (*self.taken, outcome)
        self.probability = self.probability * law[outcome]
        return outcome

    def accept(self, probability: float) -> bool:
        probability = min(1.0, probability)
        return bool(self._decide(torch.tensor([1 - probability, probability], dtype=torch.float64)))

    def choose(self, p: Tensor) -> int:
        return self._decide(p)


def law_of(run: Callable[[Replay], Hashable]) -> dict[Hashable, float]:
    """Return the exact law of run(chance), summed over all outcomes of all its decisions."""
    law: dict[Hashable, float] = defaultdict(float)
    scripts: list[tuple[int, ...]] = [()]
    while scripts:
        chance = Replay(scripts.pop())
        law[run(chance)] += float(chance.probability)
        scripts += chance.open
    return dict(law)


@pytest.fixture(name="law_of")
def _law_of() -> Callable[[Callable[[Replay], Hashable]], dict[Hashable, float]]:
    return law_of


@pytest.fixture
def golden_folder() -> Path:
    return Path(__file__).parent.parent / "golden" / "A"
