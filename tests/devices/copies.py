"""Copies that do not wait: what they bring is garbage until the device is waited for.

Into page-locked memory, values arrive when something waits for the device they come from; from page-locked
memory, what is written there before that would be what arrives. Ordinary memory is safe with either, as the
driver then waits by itself.
"""

from __future__ import annotations

import torch
from torch import Tensor


class Copies:
    """Copies in flight, and the page-locked memory that exists."""

    def __init__(self) -> None:
        self._pinned: dict[int, Tensor] = {}  # by address; kept, so that no address comes twice
        self._arriving: list[tuple[torch.device, Tensor, Tensor]] = []
        self._leaving: list[tuple[torch.device, Tensor, Tensor]] = []

    def pin(self, real: Tensor) -> Tensor:
        """Remember that `real` is page-locked, and return it."""
        self._pinned[real.untyped_storage().data_ptr()] = real
        return real

    def is_pinned(self, real: Tensor) -> bool:
        return real.numel() > 0 and real.untyped_storage().data_ptr() in self._pinned

    def arrive(self, real: Tensor, source: torch.device) -> None:
        """Let page-locked `real`, just written, be garbage until somebody waits for its `source`."""
        self._arriving.append((source, real, real.clone()))
        if real.dtype.is_floating_point:
            real.fill_(float("nan"))
        else:
            real.fill_(True if real.dtype == torch.bool else torch.iinfo(real.dtype).max)

    def leave(self, real: Tensor, place: torch.device) -> None:
        """`real` is on its way to `place` until somebody waits for that: nobody may write there."""
        self._leaving.append((place, real, real.clone()))

    def wait(self, place: torch.device) -> None:
        """What went to or from `place` is there. Raises RuntimeError where memory was written before."""
        there = [one for one in self._arriving if one[0] == place]
        gone = [one for one in self._leaving if one[0] == place]
        self._arriving = [one for one in self._arriving if one[0] != place]
        self._leaving = [one for one in self._leaving if one[0] != place]
        for _, real, value in there:
            real.copy_(value)
        for _, real, value in gone:
            if not torch.equal(_bytes(real), _bytes(value)):
                raise RuntimeError(f"page-locked memory was written while its copy to {place} was under way")


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)


COPIES = Copies()
