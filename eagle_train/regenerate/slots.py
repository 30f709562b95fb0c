"""Many texts read side by side: a cache whose slots are refilled as soon as a text has ended.

All slots share one width. A text lies flush right in its slot, so every step appends one column to all of
them, whatever their lengths; `seen` says which columns are the text's. A prompt is read on its own, padded
on the right, where causal attention needs no mask, and its keys and values are then laid into its slot.

Shapes: S slots, T columns in use, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn import functional
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer

from eagle_train.errors import UserError
from eagle_train.targets.load import Target

_MORE_COLUMNS = 256
_KINDS = ("full_attention", "sliding_attention")


class SlotLayer(DynamicLayer):
    """One layer's keys and values [S, kv heads, T, head_dim], views of larger buffers."""

    keys: Tensor
    values: Tensor

    def start(self, num_slots: int, width: int, like: Sequence[Tensor]) -> None:
        """Make empty slots of `width` columns, for keys and values as in `like` [.., heads, .., head_dim]."""
        self.device, self.is_initialized = like[0].device, True
        self._buffers = [
            rows.new_zeros(num_slots, rows.shape[1], width + _MORE_COLUMNS, rows.shape[-1]) for rows in like
        ]
        self._show(width)

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        """Append one column to every slot."""
        width = self.keys.shape[-2]
        for i, new in enumerate((key_states, value_states)):
            if width == self._buffers[i].shape[-2]:
                self._buffers[i] = functional.pad(self._buffers[i], (0, 0, 0, _MORE_COLUMNS))
            self._buffers[i][:, :, width : width + 1] = new
        self._show(width + 1)
        return self.keys, self.values

    def place(self, slot: int, rows: Sequence[Tensor]) -> None:
        """Lay keys and values [kv heads, length, head_dim] of one text flush right into a slot."""
        width = self.keys.shape[-2]
        for buffer, new in zip(self._buffers, rows, strict=True):
            buffer[slot, :, width - new.shape[-2] : width] = new

    def keep(self, slots: Tensor, first: int) -> None:
        """Keep these slots alone, and of their columns those from `first` on."""
        width = self.keys.shape[-2] - first
        room = (0, 0, 0, _MORE_COLUMNS)
        self._buffers = [
            functional.pad(buffer[slots.to(buffer.device), :, first : first + width], room)
            for buffer in self._buffers
        ]
        self._show(width)

    def _show(self, width: int) -> None:
        self.keys, self.values = (buffer[:, :, :width] for buffer in self._buffers)


class Slots:
    """S texts being continued by the target. `lengths` are the columns of each slot's text, 0 if free."""

    def __init__(self, target: Target, num_slots: int) -> None:
        self.target = target
        self.lengths = [0] * num_slots
        self._cache = Cache(layer_class_to_replicate=SlotLayer)
        self._seen = torch.zeros(num_slots, 0, dtype=torch.bool, device=target.device)

    @property
    def width(self) -> int:
        """T."""
        return self._seen.shape[1]

    @property
    def _layers(self) -> list[SlotLayer]:
        return cast(list[SlotLayer], self._cache.layers)

    def admit(self, slots: Sequence[int], prompts: Sequence[Sequence[int]]) -> Tensor:
        """Read prompts into free slots; return the logits [n, V] of the token after each.

        No prompt may be longer than `width`, unless no slot is in use: then the width becomes the longest's.
        """
        target, lengths = self.target, [len(prompt) for prompt in prompts]
        padded = torch.zeros(len(prompts), max(lengths), dtype=torch.int64)
        for i, prompt in enumerate(prompts):
            padded[i, : lengths[i]] = torch.tensor(prompt)
        read = DynamicCache()
        last = target.run_body(padded.to(target.device), cache=read)
        ends = torch.tensor(lengths, device=last.device) - 1
        if not any(self.lengths):
            self._begin(max(lengths), read)
        for layer, source in zip(self._layers, cast(list[SlotLayer], read.layers), strict=True):
            for i, slot in enumerate(slots):
                layer.place(slot, [rows[i, :, : lengths[i]] for rows in (source.keys, source.values)])
        for slot, length in zip(slots, lengths, strict=True):
            self.lengths[slot] = length
            self._seen[slot] = torch.arange(self.width, device=self._seen.device) >= self.width - length
        return target.logits(last[torch.arange(len(lengths), device=last.device), ends])

    def _begin(self, width: int, read: DynamicCache) -> None:
        self._cache = Cache(layer_class_to_replicate=SlotLayer)
        for source in cast(list[DynamicLayer], read.layers):
            layer = SlotLayer()
            layer.start(len(self.lengths), width, [cast(Tensor, source.keys), cast(Tensor, source.values)])
            self._cache.layers.append(layer)
        self._seen = self._seen.new_zeros(len(self.lengths), width)

    def step(self, tokens: Sequence[int]) -> Tensor:
        """Append one token to every slot, free ones too; return the logits [S, V] of the next."""
        device = self.target.device
        self._seen = functional.pad(self._seen, (0, 1), value=True)
        positions = torch.tensor(self.lengths, device=device)[:, None]
        self.lengths = [length + 1 if length else 0 for length in self.lengths]
        last = self.target.run_body(
            torch.tensor(tokens, device=device)[:, None],
            position_ids=positions,
            attention_mask=self._seen,
            cache=self._cache,
        )
        return self.target.logits(last[:, 0])

    def free(self, slot: int) -> None:
        """Give a slot up; what it still computes is nobody's."""
        self.lengths[slot] = 0

    def shrink(self, slots: Sequence[int]) -> None:
        """Keep these slots alone, in this order, and no column that none of them uses."""
        kept = torch.tensor(slots, device=self._seen.device)
        self.lengths = [self.lengths[slot] for slot in slots]
        first = self.width - max(self.lengths)
        for layer in self._layers:
            layer.keep(kept, first)
        self._seen = self._seen[kept, first:]


def check_decodable(target: Target) -> None:
    """Refuse targets whose layers keep a running state, which slots cannot hold."""
    kinds = sorted(set(getattr(target.config, "layer_types", None) or ()) - set(_KINDS))
    if kinds:
        raise UserError(
            f"{target.name}: has layers of kind {', '.join(kinds)}, wanted {' or '.join(_KINDS)}; "
            "let a server answer instead: --server URL"
        )
