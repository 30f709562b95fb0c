"""Reading finished shards row by row, mapped into memory, without the target and without the rows."""

from __future__ import annotations

import json
import threading
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from eagle_train.errors import UserError
from eagle_train.io.tensors import load_tensors
from eagle_train.shards.codecs import decode
from eagle_train.shards.files import ShardFile, mend_shard, open_shard, refuse_other_file
from eagle_train.shards.frozen_target import FrozenTarget, load_frozen
from eagle_train.shards.index import WrongIndex, check_index
from eagle_train.shards.listing import read_manifest
from eagle_train.shards.manifest import in_common
from eagle_train.shards.plan import Span, label_positions, num_labels
from eagle_train.shards.row_source import RowSource, ShardRow
from eagle_train.shards.schema import INDEX, MANIFEST, PLAN, holds_all_last, mend

_MOST_OPEN = 8192  # mapped shards; Linux gives a process 65,530 maps
_MOST_MAPPED = 1 << 39  # bytes of them; the tables of so many pages take 1 GiB


class Shards(RowSource):
    """A finished shard directory. Rows are numbered 0..num_rows-1, in the order they were prepared.

    A shard is compared with its checksums before it is first used, by process ``number % world``: let
    every process call `verify_rows` on the rows that all of them together are about to read.
    """

    def __init__(
        self,
        folder: Path,
        info: dict[str, Any],
        index: dict[str, Tensor],
        *,
        rank: int = 0,
        world: int = 1,
        dtype: torch.dtype | None = None,
    ) -> None:
        self.folder = folder
        self.info = self._listed = info
        self._layers: list[int] | None = None  # places of those that are read; None: all
        self.rank, self.world, self.dtype = rank, world, dtype
        self._index = index
        self._open: OrderedDict[int, dict[str, Tensor]] = OrderedDict()
        self._known: dict[int, ShardFile] = {}  # shards opened once, without what their headers say
        self._lock = threading.RLock()

    def __getstate__(self) -> dict[str, Any]:
        state = {**self.__dict__, "_open": OrderedDict()}  # maps are opened anew in each process
        del state["_lock"]
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, _lock=threading.RLock())

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

    def read_layers(self, layer_ids: tuple[int, ...], reader: str) -> None:
        """Read just these layers into `aux` from now on. Raises UserError, naming `reader`, if one lacks."""
        held, depth = self._listed["layer_ids"], self._listed["num_layers"]
        if max(layer_ids, default=0) >= depth:
            raise UserError(
                f"{self.folder}: the target has {depth} layers, {reader} reads {layer_ids}; wanted ids of 0 "
                f"to {depth - 1} (a recipe's head.layer_ids)"
            )
        if not set(layer_ids) <= set(held):
            raise UserError(
                f"{self.folder}: captured layers {tuple(held)}, {reader} reads {layer_ids}; "
                f"re-run: eagle extract --for eagle3 --layers {','.join(map(str, layer_ids))}"
            )
        self._layers = None if list(layer_ids) == held else [held.index(k) for k in layer_ids]
        self.info = {**self._listed, "layer_ids": list(layer_ids)}

    @cached_property
    def categories(self) -> list[str]:
        """What kind of conversation each row is of, by the rows' own words; empty where they say nothing."""
        return _texts(self._index["categories"]) if "categories" in self._index else [""] * self.num_rows

    def frozen_target(self) -> FrozenTarget:
        """Load the target's embedding and output map.

        Raises UserError when they are damaged or belong to other weights than the features.
        """
        return load_frozen(
            self.folder, self.info["target"].get("fingerprint"), self.info.get("target_checksum")
        )

    def read_rows(self, rows: Sequence[int]) -> list[ShardRow]:
        """Return these rows, in this order."""
        return [self.read(row) for row in rows]

    def read(self, row: int) -> ShardRow:
        """Return one row: views into mapped memory in the codec's dtype, 8-bit codecs decoded.

        Raises UserError naming the shard when it is missing, cut or damaged.
        """
        if not 0 <= row < self.num_rows:
            raise IndexError(f"row {row} of {self.num_rows}")
        tensors = self._tensors(int(self._index["shard"][row]))
        slot = int(self._index["slot"][row])
        starts, span_starts = tensors["row_starts"], tensors["span_starts"]
        first, end = int(starts[slot]), int(starts[slot + 1])
        label_first = int(tensors["label_starts"][slot])
        spans = self.spans[row]
        own = tensors["spans"][int(span_starts[slot]) : int(span_starts[slot + 1])]
        if end - first != self.lengths[row] or own.tolist() != list(map(list, spans)):
            raise UserError(
                f"{self.folder / INDEX}: row {row}: not the length and spans that its shard holds; "
                f"{mend_listing(self.folder)}"
            )
        labels = slice(label_first, label_first + num_labels(spans))
        if holds_all_last(self.info["features"]):
            last_all = self._states(tensors, "last", slice(first, end))
            label_last = _gathered(last_all, spans)
        elif "last" in tensors:
            last_all, label_last = None, self._states(tensors, "last", labels)
        else:
            last_all, label_last = None, torch.empty(num_labels(spans), 0)
        return ShardRow(
            input_ids=tensors["input_ids"][first:end].long(),
            spans=spans,
            aux=self._states(tensors, "aux", slice(first, end), self._layers) if "aux" in tensors else None,
            last_all=last_all,
            label_last=label_last,
            label_argmax=tensors["label_argmax"][labels].long(),
            label_lse=tensors["label_lse"][labels],
            label_ids=tensors["label_ids"][labels] if "label_ids" in tensors else None,
            label_logp=tensors["label_logp"][labels] if "label_logp" in tensors else None,
        )

    def _states(
        self, tensors: dict[str, Tensor], name: str, where: slice, layers: list[int] | None = None
    ) -> Tensor:
        values, scale = tensors[name][where], tensors.get(f"{name}_scale")
        scale = None if scale is None else scale[where]
        if layers is not None:
            groups = len(self._listed["layer_ids"])
            values = values.unflatten(1, (groups, -1))[:, layers].flatten(1)  # (n, G * H) -> (n, g * H)
            scale = None if scale is None else scale[:, layers]
        return decode(values, scale, self.dtype)

    def verify_rows(self, rows: Sequence[int]) -> None:
        """Verify this process's share of the shards in which `rows` lie; each shard is read once."""
        for number in self._index["shard"][list(rows)].unique().tolist():
            if number % self.world == self.rank:
                self._tensors(number)

    def _tensors(self, number: int) -> dict[str, Tensor]:
        with self._lock:  # readers in several threads
            if number not in self._open:
                self._open[number] = self._map(number)
                if len(self._open) > self._most_open:
                    self._open.popitem(last=False)
            self._open.move_to_end(number)
            return self._open[number]

    @cached_property
    def _most_open(self) -> int:
        largest = max((shard["bytes"] or 1 for shard in self.info["shards"]), default=1)
        return max(1, min(_MOST_OPEN, _MOST_MAPPED // largest))

    def _map(self, number: int) -> dict[str, Tensor]:
        if number not in self._known:
            self._known[number] = replace(self._opened(number), header={})
        tensors = self._known[number].map()
        lengths = tensors["spans"][:, 1] - tensors["spans"][:, 0] + 1
        running = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
        tensors["label_starts"] = running[tensors["span_starts"]]
        return tensors

    def _opened(self, number: int) -> ShardFile:
        """Return a shard that is the one listed, verified where that is this process's part."""
        entry = self.info["shards"][number]
        shard = open_shard(self.folder / entry["file"])
        plan = entry.get("plan", self.info["plan"])
        if shard.header.get("plan") != plan or shard.size != entry["bytes"]:
            raise UserError(
                f"{shard.path}: not the shard that {MANIFEST} lists ({shard.size:,} bytes, wanted "
                f"{entry['bytes']:,}); {mend_shard(shard.path)}"
            )
        refuse_other_head(self.folder, self._listed, shard)
        if number % self.world == self.rank:
            shard.verify()
        return shard


def mend_listing(folder: Path) -> str:
    """Say how index and manifest are made anew from whole shards."""
    return mend(folder) if (folder / PLAN).is_file() else f"eagle shards prune {folder} --damaged mends it"


def refuse_other_head(folder: Path, info: dict[str, Any], shard: ShardFile) -> None:
    """Raise UserError where the manifest says otherwise than the shard how the features were made."""
    listed, own = in_common(info), in_common(shard.header)
    for name, value in listed.items():
        if value != own[name]:
            raise UserError(
                f"{folder / MANIFEST}: {name}: got {value}, {shard.path.name} has {own[name]}; "
                f"{mend_listing(folder)}"
            )


def _gathered(last: Tensor, spans: list[Span]) -> Tensor:
    if len(spans) == 1:
        return last[spans[0][0] - 1 : spans[0][1]]  # a view
    return last[torch.from_numpy(label_positions(spans))]


def _texts(encoded: Tensor) -> list[str]:
    return json.loads(encoded.numpy().tobytes())


def open_shards(
    folder: str | Path, *, rank: int = 0, world: int = 1, dtype: torch.dtype | None = None
) -> Shards:
    """Open a finished shard directory; raise UserError when it is not there, or not finished.

    `rank` of `world` processes shares the verification with the others. `dtype` is what 8-bit states are
    decoded to, float32 when None.
    """
    folder = Path(folder)
    info = read_manifest(folder)
    again = mend_listing(folder)
    refuse_other_file(folder, INDEX, info.get("index_checksum"), again)
    try:
        index, _ = load_tensors(folder / INDEX)
    except UserError as error:
        raise UserError(f"{error}; {again}") from error
    try:
        check_index(index, info["shards"])
    except WrongIndex as wrong:
        raise UserError(f"{folder / INDEX}: {wrong}; {again}") from wrong
    return Shards(folder, info, index, rank=rank, world=world, dtype=dtype)
