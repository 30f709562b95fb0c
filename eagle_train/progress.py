"""Progress for people: a bar with rate and time left on a terminal, plain lines otherwise."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

_SECONDS_BETWEEN_LINES = 10.0


class Progress:
    """Counts units done and shows them. Use through `progress(...)`."""

    def __init__(self, title: str, total: int | None, unit: str, before: int = 0) -> None:
        self.title, self.total, self.unit = title, total, unit
        self.done = self._before = before  # what an interrupted run had done tells nothing of the rate
        self._started = self._shown = time.monotonic()

    def advance(self, count: int = 1, note: str = "") -> None:
        """Add `count` units; `note` is a short text shown behind the figures."""
        self.done += count
        now = time.monotonic()
        if now - self._shown >= _SECONDS_BETWEEN_LINES:
            self._shown = now
            print(self._line(now, note), file=sys.stderr, flush=True)

    def shorten(self, count: int) -> None:
        """Take `count` units from the total: they will not come."""
        if self.total is not None:
            self.total -= count

    def _line(self, now: float, note: str) -> str:
        rate = self._rate(now)
        of = f"/{self.total:,}" if self.total is not None else ""
        unit = self.unit.removesuffix("s") if self.total == 1 else self.unit
        left = ""
        if self.total is not None and rate:
            left = f", {_clock((self.total - self.done) / max(rate, 1e-9))} left"
        return f"{self.title}: {self.done:,}{of} {unit}, {rate:,.1f}/s{left}{_behind(note)}"

    def _rate(self, now: float) -> float:
        return (self.done - self._before) / max(now - self._started, 1e-9)

    def close(self) -> None:
        """Say what was done in this time."""
        now, count = time.monotonic(), self.done - self._before
        plural = self.unit.endswith("s")
        done = counted(count, self.unit.removesuffix("s")) if plural else f"{count:,} {self.unit}"
        words = f"{self.title}: {done} in {_clock(now - self._started)}, {self._rate(now):,.1f}/s"
        print(words, file=sys.stderr, flush=True)


class _Bar(Progress):
    """The same counts on a live terminal bar."""

    def __init__(self, title: str, total: int | None, unit: str, before: int = 0) -> None:
        super().__init__(title, total, unit, before)
        from rich import progress as rich_progress
        from rich.console import Console

        self._bar = rich_progress.Progress(
            rich_progress.TextColumn("{task.description}"),
            rich_progress.BarColumn(),
            rich_progress.TextColumn("{task.completed:,.0f}/{task.total:,.0f} {task.fields[unit]}")
            if total is not None
            else rich_progress.TextColumn("{task.completed:,.0f} {task.fields[unit]}"),
            rich_progress.TextColumn("{task.fields[rate]}"),
            rich_progress.TimeRemainingColumn(),
            rich_progress.TextColumn("{task.fields[note]}"),
            console=Console(stderr=True),
            transient=True,
        )
        self._task = self._bar.add_task(title, total=total, completed=before, unit=unit, rate="", note="")
        self._bar.start()

    def advance(self, count: int = 1, note: str = "") -> None:
        self.done += count
        rate = f"{self._rate(time.monotonic()):,.1f}/s"
        self._bar.update(self._task, completed=self.done, total=self.total, rate=rate, note=note)

    def close(self) -> None:
        self._bar.stop()
        super().close()


@contextmanager
def progress(
    title: str, total: int | None, unit: str, show: bool = True, before: int = 0
) -> Iterator[Progress]:
    """Show progress of `total` units on stderr while the block runs; `show=False` keeps silent.

    `before` of them were done earlier: they count, but not for the rate and the time left.
    """
    if not show:
        yield _Silent(title, total, unit, before)
        return
    kind = _Bar if sys.stderr.isatty() else Progress
    shown = kind(title, total, unit, before)
    try:
        yield shown
    finally:
        shown.close()


class _Silent(Progress):
    def advance(self, count: int = 1, note: str = "") -> None:
        self.done += count


def _behind(note: str) -> str:
    return f", {note}" if note else ""


def _clock(seconds: float) -> str:
    whole = round(max(seconds, 0))
    hours, rest = divmod(whole, 3600)
    return f"{hours}:{rest // 60:02}:{rest % 60:02}" if hours else f"{rest // 60}:{rest % 60:02}"


def counted(number: int, noun: str) -> str:
    """Return a number with its noun: ``1 shard``, ``1,200 shards``."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def span(seconds: float) -> str:
    """Return a time in the unit that people read: ``8 seconds``, ``3.5 minutes``, ``2.1 hours``."""
    if round(seconds) < 60:
        return counted(round(seconds), "second") if seconds >= 1 else f"{seconds:.2g} seconds"
    return f"{seconds / 60:,.1f} minutes" if seconds < 3600 else f"{seconds / 3600:,.1f} hours"


def parameters_text(count: int) -> str:
    """Return a number of parameters: ``51,200 parameters``, ``3.4 M parameters``."""
    return f"{count / 1e6:,.1f} M parameters" if count >= 1e6 else counted(count, "parameter")


def bytes_text(count: float) -> str:
    """Return a number of bytes in the unit that people read: ``12 bytes``, ``3.0 MiB``."""
    for unit in ("bytes", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:,.0f} {unit}" if unit == "bytes" else f"{count:,.1f} {unit}"
        count /= 1024
    return f"{count:,.2f} TiB"
