"""Keys and values of the tokens read so far: the target's, as transformers wants them, and the head's.

Both lie in buffers that grow by doubling, so a round copies the new rows only. This file is the one place
that knows transformers' cache classes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn import functional
from transformers.cache_utils import Cache, DynamicLayer

from eagle_train.errors import UserError

_FIRST_ROWS = 256
_KINDS = ("full_attention", "sliding_attention")
_BY_ROW = ("bloom", "mpt", "gpt_neo")


class GrowingLayer(DynamicLayer):
    """One target layer's keys and values [1, kv heads, length, head_dim], views of larger buffers."""

    keys: Tensor
    values: Tensor

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        """Append new rows and return all keys and values, as transformers' own layer does."""
        if not self.is_initialized:
            self.device, self.is_initialized = key_states.device, True
            self._buffers = [_buffer_like(key_states), _buffer_like(value_states)]
            self._show(0)
        start, end = self.keys.shape[-2], self.keys.shape[-2] + key_states.shape[-2]
        for i, new in enumerate((key_states, value_states)):
            self._buffers[i] = _grown(self._buffers[i], start, end)
            self._buffers[i][..., start:end, :] = new
        self._show(end)
        return self.keys, self.values

    def _show(self, length: int) -> None:
        self.keys, self.values = (buffer[..., :length, :] for buffer in self._buffers)

    def keep(self, start: int, kept: Tensor) -> None:
        """Of the rows from `start` on keep `kept` (offsets, ascending), moved together in place."""
        kept = kept.to(self.device)
        for buffer in self._buffers:
            buffer[..., start : start + len(kept), :] = buffer[..., start:, :].index_select(-2, kept)
        self._show(start + len(kept))


class TargetCache(Cache):
    """The cache that a target extends in its forward, and whose refused rows are taken out again.

    Layers with a sliding window keep every row (the mask hides those outside), so that a refused guess never
    pushes out a row that is still needed.
    """

    def __init__(self) -> None:
        super().__init__(layer_class_to_replicate=GrowingLayer)

    @property
    def length(self) -> int:
        """The number of tokens read."""
        return self.get_seq_length()

    def keep(self, start: int, kept: Sequence[int]) -> None:
        """Of the rows from `start` on keep those at the offsets `kept`, ascending; forget the others."""
        offsets = torch.tensor(kept, dtype=torch.int64)
        for layer in self.layers:
            cast(GrowingLayer, layer).keep(start, offsets)


def check_cacheable(config: Any, name: str) -> None:
    """Refuse targets whose layers keep a running state, or that do not go by the positions they are told.

    A running state could not take a refused guess back. ALiBi, and GPT-Neo's local attention, go by a row's
    place in the cache, where a guess stands behind its siblings.
    """
    family = getattr(config, "model_type", "")
    if family in _BY_ROW or getattr(config, "alibi", False):
        raise UserError(
            f"{name}: {family} places a token by its row in the cache (ALiBi, or a local attention of its "
            "own), wanted by its position; it cannot read a tree of guesses"
        )
    kinds = sorted(set(getattr(config, "layer_types", None) or ()) - set(_KINDS))
    if kinds:
        raise UserError(
            f"{name}: has layers of kind {', '.join(kinds)}, wanted {' or '.join(_KINDS)}; "
            "other kinds cannot take refused guesses back"
        )


def tree_masks(config: Any, sees: Tensor, past: int, positions: Tensor, dtype: torch.dtype) -> Any:
    """Return the additive mask that a target needs to read a tree: 0 where a node may look, else the lowest.

    `sees` bool [n, n] and `positions` int64 [n] are the nodes'; `past` rows stand before them. The mask is
    [1, 1, n, past + n]; targets that mix full and sliding layers get a dict of two, which they take as it is.
    """
    seen = torch.cat([sees.new_ones(len(sees), past), sees], dim=1)
    of_columns = torch.cat([torch.arange(past, device=positions.device), positions])
    return masks(config, seen[None], positions[None], of_columns[None], dtype)


def masks(config: Any, seen: Tensor, positions: Tensor, of_columns: Tensor, dtype: torch.dtype) -> Any:
    """Return the additive masks [B, 1, n, C] of n nodes of B texts over C columns, as `tree_masks` does.

    `seen` bool [B, n, C]; `positions` int64 [B, n] are the nodes', `of_columns` [B, C] those of the columns.
    """
    full = _additive(seen, dtype)
    kinds, window = getattr(config, "layer_types", None), getattr(config, "sliding_window", None)
    if window is None or (kinds is not None and "sliding_attention" not in kinds):
        return full
    windowed = _additive(seen & (positions[:, :, None] - of_columns[:, None] < window), dtype)
    return windowed if kinds is None else {"full_attention": full, "sliding_attention": windowed}


def _additive(seen: Tensor, dtype: torch.dtype) -> Tensor:
    lowest = torch.finfo(dtype).min
    return torch.zeros(seen.shape, dtype=dtype, device=seen.device).masked_fill_(~seen, lowest)[:, None]


class HeadCache:
    """A head's keys and values per layer: `length` verified rows, then those of the present draft."""

    def __init__(self) -> None:
        self.length = 0
        self.drafted = 0
        self._keys: dict[int, Tensor] = {}
        self._values: dict[int, Tensor] = {}

    def attend(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool
    ) -> Tensor:
        """Append k and v [m, kv heads, hd] behind all rows, let q [m or fewer, heads, hd] look at them.

        `mask` is additive, [rows of q, all rows]; `causal` is for m rows on an empty cache. Returns the shape
        of q. The heads that share keys are folded into the queries, so no key is copied.
        """
        start, end = self.length + self.drafted, self.length + self.drafted + len(k)
        for store, new in ((self._keys, k), (self._values, v)):
            new = new.transpose(0, 1)  # (m, kv heads, hd) -> (kv heads, m, hd)
            buffer = _grown(store[layer] if layer in store else _buffer_like(new), start, end)
            buffer[:, start:end] = new
            store[layer] = buffer
        keys, values = self._keys[layer][:, :end], self._values[layer][:, :end]
        rows, heads, width = q.shape
        if causal:
            out = functional.scaled_dot_product_attention(
                q.transpose(0, 1)[None], keys[None], values[None], is_causal=True, enable_gqa=True
            )
            return out[0].transpose(0, 1)
        shared = heads // len(keys)
        folded = q.view(rows, len(keys), shared, width).permute(1, 2, 0, 3).reshape(len(keys), -1, width)
        if mask is not None:
            mask = mask.repeat(shared, 1)
        out = functional.scaled_dot_product_attention(folded[None], keys[None], values[None], attn_mask=mask)
        return out.view(len(keys), shared, rows, width).permute(2, 0, 1, 3).reshape(rows, heads, width)


def _buffer_like(rows: Tensor) -> Tensor:
    """Return an empty buffer for rows [.., m, hd]."""
    return rows.new_empty(*rows.shape[:-2], 0, rows.shape[-1])


def _grown(buffer: Tensor, used: int, needed: int) -> Tensor:
    """Return `buffer` with room for `needed` rows, the first `used` ones kept."""
    if needed <= buffer.shape[-2]:
        return buffer
    room = max(needed, 2 * buffer.shape[-2], _FIRST_ROWS)
    larger = buffer.new_empty(*buffer.shape[:-2], room, buffer.shape[-1])
    larger[..., :used, :] = buffer[..., :used, :]
    return larger
