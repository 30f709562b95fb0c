"""Which rows an optimizer step sees, how they are cut for memory, and which process runs what.

Three levels, so that neither the number of processes nor the memory of one changes the result:
a *window* is the whole rows of one optimizer step, a function of seed, epoch and row lengths alone;
a *bin* is the rows of one forward, at most `micro_tokens`; bins are *dealt* to processes.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

from eagle_train.errors import UserError
from eagle_train.progress import counted

_MOST_ROWS = 50_000_000  # whose order, over all epochs, is drawn before a run: a minute or two
_FEW_ROWS = 5_000_000  # for a figure that may be rounded


@dataclass(frozen=True)
class Window:
    """The rows of one optimizer step."""

    step: int  # steps before this one, over all epochs
    epoch: int
    rows: tuple[int, ...]
    tokens: int


@dataclass(frozen=True)
class Plan:
    """All windows of a run. Every row is in exactly one window of each epoch.

    Rows follow each other in a random order of `seed` and epoch; a window closes before the row that
    would take it past `tokens_per_step` tokens (a longer row is a window alone), or after
    `rows_per_step` rows. The last window of an epoch may be smaller; it is a step like any other.
    """

    rows: tuple[int, ...]
    lengths: tuple[int, ...]  # of those rows, in tokens
    seed: int
    tokens_per_step: int | None = None
    rows_per_step: int | None = None

    def __post_init__(self) -> None:
        assert len(self.rows) == len(self.lengths)
        assert (self.tokens_per_step is None) != (self.rows_per_step is None)

    def epoch(self, epoch: int) -> tuple[tuple[tuple[int, ...], int], ...]:
        """Return the (rows, tokens) of each window of one epoch, in order."""
        return _epoch_windows(self, epoch)

    def windows(self, start: int = 0) -> Iterator[Window]:
        """Yield windows without end, epoch after epoch, beginning with step `start`."""
        first = 0
        for epoch in itertools.count():
            windows = self.epoch(epoch)
            for i in range(max(0, start - first), len(windows)):
                rows, tokens = windows[i]
                yield Window(first + i, epoch, rows, tokens)
            first += len(windows)

    def num_steps(self, epochs: int | None, steps: int | None, tokens: int | None) -> int | None:
        """Return the steps within the one budget given, None without one.

        A budget of tokens ends with the step that reaches it. Raises UserError for more epochs than can be
        gone through.
        """
        if steps is not None:
            return steps
        if epochs is not None:
            return self._steps_of(epochs, f"run.epochs: got {epochs}")
        if tokens is None:
            return None
        whole, rest = divmod(tokens - 1, sum(self.lengths))  # every epoch has as many tokens
        before = itertools.accumulate(size for _, size in self.epoch(whole))
        return self._steps_of(whole, f"run.tokens: got {tokens}") + 1 + sum(seen <= rest for seen in before)

    def about_tokens(self, steps: int) -> int:
        """Return the tokens of that many steps, exact but by a mean where that means millions of rows."""
        total, each = sum(self.lengths), self._windows_of_each
        if each is not None:
            whole, rest = divmod(steps, each)
            return whole * total + sum(size for _, size in self.epoch(whole)[:rest])
        before = 0  # steps of earlier epochs
        for epoch in range(epochs := self._epochs_within(_FEW_ROWS)):
            windows = self.epoch(epoch)
            if steps < before + len(windows):
                return epoch * total + sum(size for _, size in windows[: steps - before])
            before += len(windows)
        return steps * total * epochs // before

    def _steps_of(self, epochs: int, got: str) -> int:
        if self._windows_of_each is not None:
            return epochs * self._windows_of_each
        if epochs > (most := self._epochs_within(_MOST_ROWS)):
            raise UserError(
                f"{got}, which is {epochs:,} epochs of {counted(len(self.rows), 'row')}, wanted at most "
                f"{most:,}; set run.steps instead"
            )
        return sum(len(self.epoch(epoch)) for epoch in range(epochs))

    @property
    def _windows_of_each(self) -> int | None:
        """The windows of an epoch where all have as many, whatever their order; else None."""
        if self.rows_per_step is not None:
            return -(-len(self.rows) // self.rows_per_step)
        equal = len(set(self.lengths)) == 1 or sum(self.lengths) <= (self.tokens_per_step or 0)
        return len(self.epoch(0)) if equal else None

    def _epochs_within(self, rows: int) -> int:
        """Return the epochs that may be gone through where as many rows are enough; 20 may always."""
        return max(20, rows // (len(self.rows) + 8))


@lru_cache(maxsize=4)
def _epoch_windows(plan: Plan, epoch: int) -> tuple[tuple[tuple[int, ...], int], ...]:
    order = sorted(range(len(plan.rows)), key=lambda i: _draw(plan.seed, epoch, plan.rows[i]))
    windows: list[tuple[tuple[int, ...], int]] = []
    rows: list[int] = []
    tokens = 0
    most_rows = plan.rows_per_step or len(order)
    most_tokens = plan.tokens_per_step or float("inf")
    for i in order:
        if rows and (len(rows) == most_rows or tokens + plan.lengths[i] > most_tokens):
            windows.append((tuple(rows), tokens))
            rows, tokens = [], 0
        rows.append(plan.rows[i])
        tokens += plan.lengths[i]
    if rows:
        windows.append((tuple(rows), tokens))
    return tuple(windows)


def _draw(seed: int, epoch: int, row: int) -> bytes:
    """A random number that no library version changes, so that a run can be resumed years later."""
    return hashlib.blake2b(f"{seed}/{epoch}/{row}".encode(), digest_size=8).digest()


def bins(rows: Sequence[int], lengths: Sequence[int], micro_tokens: int, world: int = 1) -> list[list[int]]:
    """Cut `rows` into bins of at most `micro_tokens` tokens (a longer row is alone), as many as fill
    `world` processes evenly. Longest rows first, each into the emptiest bin with room.

    `lengths` are those of `rows`, in the same order. Inside a bin rows keep the order given.
    """
    share = -(-sum(lengths) // max(1, world * micro_tokens)) * world
    filled: list[list[int]] = [[] for _ in range(max(1, min(share, len(rows))))]
    tokens = [0] * len(filled)
    for i in sorted(range(len(rows)), key=lambda i: (-lengths[i], i)):
        bin_ = min(range(len(filled)), key=tokens.__getitem__)
        if tokens[bin_] and tokens[bin_] + lengths[i] > micro_tokens:
            bin_ = len(filled)
            filled.append([])
            tokens.append(0)
        filled[bin_].append(i)
        tokens[bin_] += lengths[i]
    order = sorted(range(len(filled)), key=lambda b: (-tokens[b], b))
    return [[rows[i] for i in sorted(filled[b])] for b in order if filled[b]]


def deal(bins_: Sequence[list[int]], rank: int, world: int) -> list[list[int]]:
    """Return the bins of one process; all processes get equally many, the missing ones are empty."""
    rounds = -(-len(bins_) // world)
    mine = [list(bins_[i]) for i in range(rank, len(bins_), world)]
    return mine + [[] for _ in range(rounds - len(mine))]
