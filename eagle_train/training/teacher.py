"""The target's output map in the dtype of a step's products, rounded once and not at every batch."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from eagle_train.shards.frozen_target import FrozenTarget


class Teacher:
    """Gives the frozen target as it is, or under autocast one whose output map has autocast's dtype."""

    def __init__(self, target: FrozenTarget) -> None:
        self._target = target
        self._rounded: FrozenTarget | None = None

    def __call__(self) -> FrozenTarget:
        device = self._target.device.type
        if not torch.is_autocast_enabled(device):
            return self._target
        dtype = torch.get_autocast_dtype(device)
        if self._rounded is None or self._rounded.dtype != dtype:
            bias = None if self._target.bias is None else self._target.bias.to(dtype)
            self._rounded = replace(self._target, lm_head=self._target.lm_head.to(dtype), bias=bias)
        return self._rounded
