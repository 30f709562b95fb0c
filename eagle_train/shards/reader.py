"""Reading finished shards row by row, mapped into memory, without the target and without the rows."""

from __future__ import annotations

import json
from collections import OrderedDict
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from eagle_train.errors import UserError
from eagle_train.io import load_tensors, read_json
from eagle_train.shards.files import open_shard
from eagle_train.shards.frozen_target import FrozenTarget
from eagle_train.shards.plan import Span, label_positions, num_labels
from eagle_train.shards.schema import INDEX, MANIFEST, PLAN, holds_all_last, refuse_version

_MOST_OPEN = 256  # mapped shards; each holds a file descriptor


@dataclass(frozen=True)
class ShardRow:
    """One document with its features. L tokens, m label positions s-1..e-1 of its spans, in order."""

    input_ids: Tensor  # (L,) int64
    spans: list[Span]  # answers, [first, last] inclusive
    aux: Tensor | None  # (L, 3H) aux[t]: having read token t
    last_all: Tensor | None  # (L, H) final state after the norm, of every token
    label_last: Tensor  # (m, H) final state after the norm, at label positions
    label_argmax: Tensor  # (m,) int64 the target's most likely token over its whole vocabulary
    label_lse: Tensor  # (m,) float32 log-sum-exp of the target's logits over its whole vocabulary


class Shards:
    """A finished shard directory. Rows are numbered 0..num_rows-1, in the order they were prepared."""

    def __init__(self, folder: Path, info: dict[str, Any], index: dict[str, Tensor]) -> None:
        self.folder = folder
        self.info = info
        self._index = index
        self._open: OrderedDict[int, dict[str, Tensor]] = OrderedDict()
        self._verified: set[int] = set()

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_open": OrderedDict()}  # maps are opened anew in each process

    def __len__(self) -> int:
        return self.num_rows

    @property
    def num_rows(self) -> int:
        """R."""
        return len(self._index["lengths"])

    @cached_property
    def lengths(self) -> np.ndarray:
        """Tokens of each row, int64 [R]."""
        return self._index["lengths"].numpy()

    @cached_property
    def spans(self) -> list[list[Span]]:
        """Answers of each row as (first, last), inclusive."""
        starts = self._index["span_starts"].tolist()
        spans = [(s, e) for s, e in self._index["spans"].tolist()]
        return [spans[a:b] for a, b in pairwise(starts)]

    @cached_property
    def row_ids(self) -> list[str]:
        """The prepared rows' ids."""
        return _texts(self._index["row_ids"])

    @cached_property
    def conversation_ids(self) -> list[str]:
        """The conversation that each row comes from."""
        return _texts(self._index["conversation_ids"])

    @cached_property
    def supervised_frequencies(self) -> dict[int, int]:
        """How often each token id is supervised."""
        return {int(token): int(count) for token, count in self.info["supervised_frequencies"].items()}

    def frozen_target(self) -> FrozenTarget:
        """Load the target's embedding and output map."""
        return FrozenTarget.load(self.folder)

    def read(self, row: int) -> ShardRow:
        """Return one row; its tensors are views into mapped memory, in the codec's dtype.

        Raises UserError naming the shard when it is missing or cut.
        """
        if not 0 <= row < self.num_rows:
            raise IndexError(f"row {row} of {self.num_rows}")
        tensors = self._tensors(int(self._index["shard"][row]))
        slot = int(self._index["slot"][row])
        starts, span_starts = tensors["row_starts"], tensors["span_starts"]
        first, end = int(starts[slot]), int(starts[slot + 1])
        label_first = int(tensors["label_starts"][slot])
        spans = self.spans[row]
        assert int(span_starts[slot + 1] - span_starts[slot]) == len(spans)
        labels = slice(label_first, label_first + num_labels(spans))
        if holds_all_last(self.info["features"]):
            last_all = tensors["last"][first:end]
            label_last = _gathered(last_all, spans)
        else:
            last_all, label_last = None, tensors["last"][labels]
        return ShardRow(
            input_ids=tensors["input_ids"][first:end].long(),
            spans=spans,
            aux=tensors["aux"][first:end] if "aux" in tensors else None,
            last_all=last_all,
            label_last=label_last,
            label_argmax=tensors["label_argmax"][labels].long(),
            label_lse=tensors["label_lse"][labels],
        )

    def _tensors(self, number: int) -> dict[str, Tensor]:
        if number in self._open:
            self._open.move_to_end(number)
            return self._open[number]
        entry = self.info["shards"][number]
        shard = open_shard(self.folder / entry["file"])
        if shard.header.get("plan") != self.info["plan"] or shard.size != entry["bytes"]:
            raise UserError(
                f"{shard.path}: not the shard that {MANIFEST} lists ({shard.size:,} bytes, wanted "
                f"{entry['bytes']:,}); run the same eagle extract again: it makes this shard anew"
            )
        if number not in self._verified:  # read once before it is used
            shard.verify()
            self._verified.add(number)
        tensors = shard.map()
        lengths = tensors["spans"][:, 1] - tensors["spans"][:, 0] + 1
        running = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
        tensors["label_starts"] = running[tensors["span_starts"]]
        self._open[number] = tensors
        if len(self._open) > _MOST_OPEN:
            self._open.popitem(last=False)
        return tensors

    def verify(self) -> None:
        """Read every shard and compare its checksums; raise UserError naming the first damaged one."""
        for entry in self.info["shards"]:
            open_shard(self.folder / entry["file"]).verify()


def _gathered(last: Tensor, spans: list[Span]) -> Tensor:
    if len(spans) == 1:
        return last[spans[0][0] - 1 : spans[0][1]]  # a view
    return last[torch.from_numpy(label_positions(spans))]


def _texts(encoded: Tensor) -> list[str]:
    return json.loads(encoded.numpy().tobytes())


def open_shards(folder: str | Path) -> Shards:
    """Open a finished shard directory; raise UserError when it is not there, or not finished."""
    folder = Path(folder)
    if not folder.is_dir():
        raise UserError(
            f"{folder}: no such folder; make it with eagle extract ROWS --target T --out {folder}"
        )
    if not (folder / MANIFEST).is_file():
        state = (
            "extraction is not finished; run the same eagle extract again, it goes on"
            if (folder / PLAN).is_file()
            else "not a folder of shards; wanted the --out of eagle extract"
        )
        raise UserError(f"{folder / MANIFEST}: not found; {state}")
    info = read_json(folder / MANIFEST, "run the same eagle extract again")
    refuse_version(folder / MANIFEST, info)
    index, _ = load_tensors(folder / INDEX)
    return Shards(folder, info, index)
