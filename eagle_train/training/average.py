"""An exponential moving average of the weights: it is what is evaluated and saved, never trained on."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

PREFIX = "trained/"  # in a checkpoint, the weights behind the average


class Average:
    """average <- decay * average + (1 - decay) * weights after every step.

    Early on the decay is at most (1 + t) / (10 + t) after t steps, so that the start is soon forgotten.
    """

    def __init__(self, head: nn.Module, decay: float) -> None:
        self.decay, self.num_updates = decay, 0
        self._parameters = dict(head.named_parameters())
        self._average = {name: p.detach().clone() for name, p in self._parameters.items()}

    @torch.no_grad()
    def update(self) -> None:
        """Take in the weights as they are now."""
        self.num_updates += 1
        decay = min(self.decay, (1 + self.num_updates) / (10 + self.num_updates))
        for name, parameter in self._parameters.items():
            self._average[name].lerp_(parameter, 1 - decay)

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Let the head hold the average while the block runs."""
        self._swap()
        try:
            yield
        finally:
            self._swap()

    def state(self) -> dict[str, Tensor]:
        """Return the trained weights (the average is the checkpoint's head) and the number of updates."""
        trained = {f"{PREFIX}{name}": p.detach() for name, p in self._parameters.items()}
        return {**trained, f"{PREFIX}updates": torch.tensor(self.num_updates)}

    def load(self, stored: dict[str, Tensor]) -> None:
        """Take up what `state` gave, taking it out of `stored`; the head holds the average before."""
        self.num_updates = int(stored.pop(f"{PREFIX}updates"))
        with torch.no_grad():
            for name, parameter in self._parameters.items():
                self._average[name].copy_(parameter)
                parameter.copy_(stored.pop(f"{PREFIX}{name}"))

    def _swap(self) -> None:
        for name, parameter in self._parameters.items():
            parameter.data, self._average[name] = self._average[name], parameter.data
