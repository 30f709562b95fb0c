"""Shards that pass by: made while training reads them, in its order, and removed once they are used up.

The first shards of such a plan hold the held-out rows and stay, as every evaluation reads them. Each of the
next holds the rows of consecutive optimizer steps. Rows that nobody reads lie in the last, never made.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from eagle_train.errors import UserError
from eagle_train.progress import bytes_text
from eagle_train.shards.manifest import described
from eagle_train.shards.plan import RowTable
from eagle_train.shards.reader import Shards
from eagle_train.shards.schema import Plan, shard_name
from eagle_train.shards.sizes import file_size
from eagle_train.shards.writer import finished_shard

_LOOK = 0.05  # seconds between looks for a shard that is not there yet
_SMALL = 1 << 16  # bytes of claims and of headers


@dataclass(frozen=True)
class Passage:
    """When the shards of a plan are read. `begins` and `ends` count optimizer steps."""

    plan: Plan
    stay: tuple[int, ...]  # shards of held-out rows
    begins: dict[int, int]  # shard -> steps done before the first that reads it, in order
    ends: dict[int, int]  # shard -> steps after which it is used up

    @classmethod
    def of(cls, plan: Plan, steps: Sequence[Sequence[int]], held_out: Sequence[int]) -> Passage:
        """Return what `steps`, each some rows, and evaluations of `held_out` rows read."""
        shard_of = {row: number for number, shard in enumerate(plan.shards) for row in shard.rows}
        begins: dict[int, int] = {}
        ends: dict[int, int] = {}
        for step, rows in enumerate(steps):
            for number in {shard_of[row] for row in rows}:
                begins.setdefault(number, step)
                ends[number] = step + 1
        return cls(plan, tuple(sorted({shard_of[row] for row in held_out})), begins, ends)

    def wanted(self, done: int, num_steps: int) -> list[int]:
        """Return the shards that steps `done` to `num_steps` read, in order, after those that stay."""
        passing = [n for n, end in self.ends.items() if end > done and self.begins[n] < num_steps]
        return [*self.stay, *passing]

    def used_up(self, done: int) -> list[int]:
        """Return the shards that nobody reads after `done` steps."""
        return [number for number, end in self.ends.items() if end <= done]

    def least_room(self, table: RowTable, target_bytes: int) -> int:
        """Return the bytes of disk without which training would wait for ever."""
        size = {n: file_size(self.plan, n, table) for n in (*self.stay, *self.ends)}
        staying = target_bytes + len(self.plan.text()) + sum(size[n] for n in self.stay)
        return staying + max(size[n] for n in self.ends) + _SMALL


def groups_of(
    steps: Sequence[Sequence[int]], held_out: Sequence[int], table: RowTable, shard_tokens: int
) -> list[tuple[int, ...]]:
    """Return the rows of each shard: held-out rows, then whole steps in order, then rows nobody reads.

    A shard holds about `shard_tokens` tokens at most, but one step at least.
    """
    groups = [
        *_joined([[row] for row in held_out], table, shard_tokens),
        *_joined(steps, table, shard_tokens),
    ]
    read = {row for group in groups for row in group}
    rest = tuple(row for row in range(len(table)) if row not in read)
    return [*groups, rest] if rest else groups


def _joined(parts: Iterable[Sequence[int]], table: RowTable, most: int) -> list[tuple[int, ...]]:
    groups: list[list[int]] = []
    tokens = 0
    for part in parts:
        more = int(table.lengths[list(part)].sum())
        if not groups or tokens + more > most:
            groups.append([])
            tokens = 0
        groups[-1] += part
        tokens += more
    return [tuple(group) for group in groups]


class PassingShards(Shards):
    """Reads the shards of a passage, waiting for those that are not there yet.

    `check` raises UserError when nobody makes them any more, `stop` ends their making.
    """

    def __init__(
        self,
        folder: Path,
        passage: Passage,
        table: RowTable,
        frequencies: dict[str, int],
        *,
        max_disk: int,
        check: Callable[[], None] = lambda: None,
        stop: Callable[[], None] = lambda: None,
        rank: int = 0,
        world: int = 1,
        dtype: torch.dtype | None = None,
    ) -> None:
        plan = passage.plan
        info = {
            "plan": plan.identity,
            **described(plan.setting),
            "num_rows": plan.num_rows,
            "skipped": [],
            "shards": [
                {"file": shard_name(number), "bytes": None}  # known once it is there
                for number in range(len(plan.shards))
            ],
            "supervised_frequencies": frequencies,
        }
        super().__init__(folder, info, _index(plan, table), rank=rank, world=world, dtype=dtype)
        self.passage, self.max_disk = passage, max_disk
        self._check, self._stop = check, stop
        self._closed = threading.Event()
        self._removed: set[int] = set()

    def keep(self, rows: Sequence[int]) -> str:
        """Say where shards pass by; those of held-out rows stay there."""
        name = self.info["target"]["name"]
        return f"features from {name}, in shards that pass by: at most {bytes_text(self.max_disk)}"

    def read_past(self, step: int) -> None:
        """Let go of maps that this process needs no more, which would hold a removed file's room."""
        with self._lock:
            for number in self.passage.used_up(step):
                self._open.pop(number, None)

    def trained_past(self, step: int) -> None:
        """Remove the shards that nobody reads after so many steps."""
        for number in self.passage.used_up(step):
            if number not in self._removed:
                (self.folder / shard_name(number)).unlink(missing_ok=True)
                self._removed.add(number)

    def close(self) -> None:
        """End all waiting, and the making of shards."""
        self._closed.set()
        self._stop()

    def _tensors(self, number: int) -> dict[str, Tensor]:
        if number not in self._open:
            self._wait_for(number)  # without the lock: another thread may read what is there
        try:
            return super()._tensors(number)
        except UserError as error:
            fault = str(error).rsplit("; ", 1)[0]
            raise UserError(
                f"{fault}; remove that file and give the same command again: it is made anew"
            ) from error

    def _wait_for(self, number: int) -> None:
        while (shard := finished_shard(self.folder, self.passage.plan, number)) is None:
            if self._closed.is_set():
                raise UserError(f"{self.folder}: closed while a shard was waited for")
            self._check()
            time.sleep(_LOOK)
        self.info["shards"][number]["bytes"] = shard.size


def _index(plan: Plan, table: RowTable) -> dict[str, Tensor]:
    """Return what index.safetensors says of finished shards: here of shards to come."""
    shard, slot = torch.zeros((2, len(table)), dtype=torch.int64)
    for number, planned in enumerate(plan.shards):
        rows = torch.tensor(planned.rows)
        shard[rows], slot[rows] = number, torch.arange(len(rows))
    counts = [len(spans) for spans in table.spans]
    pairs = [span for spans in table.spans for span in spans]
    index = {
        "shard": shard,
        "slot": slot,
        "lengths": torch.from_numpy(table.lengths),
        "span_starts": torch.tensor([0, *counts]).cumsum(0),
        "spans": torch.tensor(pairs, dtype=torch.int64).reshape(-1, 2),
    }
    names: dict[str, Any] = {"row_ids": table.row_ids, "conversation_ids": table.conversation_ids}
    for name, texts in names.items():
        body = json.dumps(texts, ensure_ascii=False).encode()
        index[name] = torch.frombuffer(bytearray(body), dtype=torch.uint8)
    return index
