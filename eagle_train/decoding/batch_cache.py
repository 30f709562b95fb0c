"""Keys and values of several texts of different lengths, extended and cut back together.

Every text lies flush left in its own row of a layer's buffers; the texts in use are the first ones. A forward
appends n columns to each, at its own length, so what a text holds needs no gaps and no masks of its own.

Shapes: B texts in use, n nodes a tree (the longest; shorter ones are filled up), C columns.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor
from transformers.cache_utils import Cache, DynamicLayer

from eagle_train.decoding.cache import GrowingLayer, TargetCache

_FIRST_COLUMNS = 256


class BatchLayer(DynamicLayer):
    """One layer's keys and values [B, kv heads, C, head_dim], views of larger buffers.

    Columns that no text has written yet are zero, and all are finite: a masked NaN would still be a NaN.
    """

    keys: Tensor
    values: Tensor

    def __init__(self, lengths: list[int], most: int) -> None:
        super().__init__()
        self._lengths, self._most = lengths, most  # of the texts in use; the cache's own list
        self._buffers: list[Tensor] = []

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        """Write n new rows behind each text; return all keys and values, up to the last column in use."""
        rows, columns = self._places(range(key_states.shape[-2]))
        width = max(self._lengths) + key_states.shape[-2]
        self._grow(width)
        for buffer, new in zip(self._buffers, (key_states, value_states), strict=True):
            buffer.transpose(1, 2)[rows, columns] = new.transpose(1, 2)
        self.keys, self.values = (buffer[: len(self._lengths), :, :width] for buffer in self._buffers)
        return self.keys, self.values

    def keep(self, kept: Sequence[Sequence[int]]) -> None:
        """Move those of the rows behind each text that stay together; `kept` are ascending offsets."""
        most = max(map(len, kept))
        source = [[*offsets, *[0] * (most - len(offsets))] for offsets in kept]
        rows, columns = self._places(range(most))
        start = columns[:, :1]
        from_columns = start + torch.tensor(source, device=start.device)
        for buffer in self._buffers:
            view = buffer.transpose(1, 2)
            view[rows, columns] = view[rows, from_columns]  # what is moved is copied first

    def place(self, text: int, layer: GrowingLayer) -> None:
        """Lay the rows of a text that was read alone into the row of `text`."""
        alone = (layer.keys, layer.values)
        if not self._buffers:
            self.device, self.is_initialized = layer.keys.device, True
            self._buffers = [rows.new_zeros(self._most, rows.shape[1], 0, rows.shape[-1]) for rows in alone]
        self._grow(alone[0].shape[-2])
        for buffer, rows in zip(self._buffers, alone, strict=True):
            buffer[text, :, : rows.shape[-2]] = rows[0]

    def move(self, source: int, text: int) -> None:
        """Copy the rows of one text over those of another."""
        for buffer in self._buffers:
            buffer[text] = buffer[source]

    def _places(self, offsets: range) -> tuple[Tensor, Tensor]:
        """Return index tensors [B, 1] and [B, len(offsets)] of the columns behind each text."""
        lengths = torch.tensor(self._lengths, device=self.device)[:, None]
        rows = torch.arange(len(self._lengths), device=self.device)[:, None]
        return rows, lengths + torch.arange(len(offsets), device=self.device)

    def _grow(self, columns: int) -> None:
        room = self._buffers[0].shape[-2]
        if columns <= room:
            return
        more = max(columns, 2 * room, _FIRST_COLUMNS) - room
        self._buffers = [torch.nn.functional.pad(buffer, (0, 0, 0, more)) for buffer in self._buffers]


class BatchCache(Cache):
    """The caches of up to `most` texts. `lengths` are the tokens read of each text in use."""

    def __init__(self, most: int) -> None:
        super().__init__(layers=[])
        self.lengths: list[int] = []
        self._most = most

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """The longest text's, for the model to size its masks by."""
        return max(self.lengths, default=0)

    def join(self, alone: TargetCache) -> None:
        """Take in a text that was read alone, as the last one."""
        while len(self.layers) < len(alone.layers):
            self.layers.append(BatchLayer(self.lengths, self._most))
        for layer, source in zip(self._layers, alone.layers, strict=True):
            layer.place(len(self.lengths), cast(GrowingLayer, source))
        self.lengths.append(alone.length)

    def leave(self, text: int) -> None:
        """Forget a text; the last one takes its place."""
        last = len(self.lengths) - 1
        if text != last:
            for layer in self._layers:
                layer.move(last, text)
            self.lengths[text] = self.lengths[last]
        self.lengths.pop()

    def keep(self, kept: Sequence[Sequence[int]]) -> None:
        """Of the rows just read behind each text keep those at its offsets, ascending; forget the others."""
        if any(list(offsets) != list(range(len(offsets))) for offsets in kept):
            for layer in self._layers:
                layer.keep(kept)
        for text, offsets in enumerate(kept):
            self.lengths[text] += len(offsets)

    @property
    def _layers(self) -> list[BatchLayer]:
        return cast(list[BatchLayer], self.layers)
