"""From the plan's windows to this process's micro-batches, read ahead of the arithmetic."""

from __future__ import annotations

import contextlib
import hashlib
import queue
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, TypeVar

import torch
from torch import Tensor

from eagle_train.shards.batches import PackedBatch, counted_rows, idle, pack
from eagle_train.shards.sampler import Window, bins, deal
from eagle_train.training.eagle1_step import noisy

if TYPE_CHECKING:
    from eagle_train.shards.row_source import RowSource

Item = TypeVar("Item")


@dataclass(frozen=True)
class Micro:
    """One forward and backward of this process."""

    batch: PackedBatch
    window: Window
    counts: Tensor  # [S] rows counted at each step in the whole window, all processes
    closes: bool  # the last of its window: gradients are summed and the weights updated


@dataclass(frozen=True)
class Loader:
    """Reads rows as packed batches for one process."""

    source: RowSource
    kind: str
    num_steps: int
    micro_tokens: int
    rank: int = 0
    world: int = 1
    noise: float = 0.0  # EAGLE-1's input noise, in training only
    seed: int = 0
    pinned: bool = False

    def training(self, windows: Iterable[Window]) -> Iterator[Micro]:
        """Yield this process's micro-batches, equally many on every process in each window."""
        for window in windows:
            counts = torch.tensor([self._counted(row) for row in window.rows]).sum(0)
            mine = self._dealt(window.rows)
            for i, rows in enumerate(mine):
                batch = self._read(rows) if rows else idle(self._read(window.rows[:1]))
                if rows and self.noise:
                    batch = self._with_noise(batch, rows, window.epoch)
                closes = i == len(mine) - 1
                if closes:
                    self.source.read_past(window.step + 1)
                yield Micro(batch.pin() if self.pinned else batch, window, counts, closes)

    def evaluation(self, rows: Sequence[int]) -> Iterator[PackedBatch]:
        """Yield this process's share of `rows`, which may be nothing."""
        return (batch for _, batch in self.numbered(rows))

    def numbered(self, rows: Sequence[int]) -> Iterator[tuple[list[int], PackedBatch]]:
        """Do the same, each batch behind the numbers of its rows."""
        for mine in self._dealt(rows):
            if mine:
                yield mine, self._read(mine)

    def _dealt(self, rows: Sequence[int]) -> list[list[int]]:
        self.source.verify_rows(rows)  # this process's share, before anybody's update depends on it
        lengths = [int(self.source.lengths[row]) for row in rows]
        return deal(bins(rows, lengths, self.micro_tokens, self.world), self.rank, self.world)

    def _read(self, rows: Sequence[int]) -> PackedBatch:
        return pack(self.source.read_rows(rows), self.kind)

    def _counted(self, row: int) -> list[int]:
        return counted_rows(self.source.spans[row], self.num_steps)

    def _with_noise(self, batch: PackedBatch, rows: Sequence[int], epoch: int) -> PackedBatch:
        """Add noise drawn for each row by itself, so that it does not depend on how rows are packed."""
        uniform = torch.empty(batch.feature.shape)
        for row, start, end in zip(rows, batch.row_starts[:-1], batch.row_starts[1:], strict=True):
            draw = hashlib.blake2b(f"noise/{self.seed}/{epoch}/{row}".encode(), digest_size=7).digest()
            generator = torch.Generator().manual_seed(int.from_bytes(draw, "big"))
            uniform[start:end].uniform_(generator=generator)
        place, starts = batch.feature.device, batch.row_starts.to(batch.feature.device)
        return replace(batch, feature=noisy(batch.feature, uniform.to(place), starts, self.noise))


class ReadAhead(Iterator[Item]):
    """Run an iterator in a thread, `depth` items ahead. Errors arrive where the item would have.

    `waited` is the time in seconds that the consumer has spent waiting for items.
    """

    def __init__(self, items: Iterator[Item], depth: int = 2) -> None:
        self.waited = 0.0
        self._queue: queue.Queue[tuple[str, object]] = queue.Queue(maxsize=depth)
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._fill, args=(items,), daemon=True)
        self._thread.start()

    def __next__(self) -> Item:
        started = time.monotonic()
        word, value = self._queue.get()
        self.waited += time.monotonic() - started
        if word == "item":
            return value  # type: ignore[return-value]
        self._queue.put((word, value))  # asking again gives the same end
        if isinstance(value, BaseException):
            raise value
        raise StopIteration

    def close(self) -> None:
        """Stop reading and wait for the thread."""
        self._closed.set()
        while self._thread.is_alive():
            with contextlib.suppress(queue.Empty):
                self._queue.get_nowait()
            self._thread.join(0.01)

    def _fill(self, items: Iterator[Item]) -> None:
        try:
            for item in items:
                if not self._put("item", item):
                    return
            self._put("end", None)
        except BaseException as error:
            self._put("end", error)

    def _put(self, word: str, value: object) -> bool:
        while not self._closed.is_set():
            with contextlib.suppress(queue.Full):
                self._queue.put((word, value), timeout=0.1)
                return True
        return False
