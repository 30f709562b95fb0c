"""What an engine counts of its drafts, and what our loop's answers come to by the same rules."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from eagle_train.decoding.loop import Generation


@dataclass(frozen=True)
class Counters:
    """Rounds of verification, accepted guesses (those past a text's end too), the latter by position."""

    drafts: int = 0
    accepted: int = 0
    by_position: tuple[int, ...] = ()

    def __sub__(self, other: Counters) -> Counters:
        """Return what was counted since `other`. Raises ValueError where a counter went down or away."""
        before = other.by_position or (0,) * len(self.by_position)
        if len(before) != len(self.by_position):
            raise ValueError(f"{len(before)} positions before, {len(self.by_position)} now")
        now, then = ((c.drafts, c.accepted) for c in (self, other))
        counted = [a - b for a, b in zip((*now, *self.by_position), (*then, *before), strict=True)]
        if min(counted) < 0:
            raise ValueError("a counter went down")
        return Counters(counted[0], counted[1], tuple(counted[2:]))

    @classmethod
    def of_histogram(cls, histogram: Sequence[int], depth: int) -> Counters:
        """Count `histogram[n]` rounds that accepted n guesses, of `depth` at most."""
        accepted = sum(n * rounds for n, rounds in enumerate(histogram))
        return cls(sum(histogram), accepted, tuple(sum(histogram[i + 1 :]) for i in range(depth)))

    @property
    def figures(self) -> dict[str, Any]:
        """Return acceptance length and rates as vLLM reports them: 1 + accepted / drafts."""
        rounds = self.drafts or 1
        return {
            "drafts": self.drafts,
            "acceptance_length": 1 + self.accepted / rounds,
            "accepted_by_position": [count / rounds for count in self.by_position],
        }


def add_up(parts: Sequence[Counters]) -> Counters:
    """Return the sums of several answers' counters."""
    columns = zip(*(part.by_position for part in parts), strict=True)
    return Counters(
        sum(part.drafts for part in parts), sum(part.accepted for part in parts), tuple(map(sum, columns))
    )


def loop_counters(made: Generation, depth: int) -> Counters:
    """Return what an engine would have counted for an answer of our loop, guesses past its end included."""
    histogram = [made.accepted_uncut.count(n) for n in range(depth + 1)]
    return Counters.of_histogram(histogram, depth)
