"""What families do to the lm_head's output, read from their configs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from eagle_train.errors import UserError

if TYPE_CHECKING:
    from transformers import PretrainedConfig


@dataclass(frozen=True)
class OutputMap:
    """What a family does to the lm_head's output, in this order."""

    multiply: float = 1.0  # Cohere, Falcon-H1
    divide: float = 1.0  # Granite; a division of its own, so that not a bit differs
    softcap: float | None = None  # Gemma

    def __call__(self, logits: Tensor) -> Tensor:
        if self.multiply != 1.0:
            logits = logits * self.multiply
        if self.divide != 1.0:
            logits = logits / self.divide
        return logits if self.softcap is None else torch.tanh(logits / self.softcap) * self.softcap


def output_map(config: PretrainedConfig) -> OutputMap:
    """Read from the config what its family does to the logits."""
    multiply = 1.0
    for name in ("logit_scale", "lm_head_multiplier"):
        multiply *= _number(name, getattr(config, name, None), 1.0)
    divide = _number("logits_scaling", getattr(config, "logits_scaling", None), 1.0)
    softcap = getattr(config, "final_logit_softcapping", None)
    return OutputMap(multiply, divide, None if softcap is None else _number("softcap", softcap, 0.0))


def _number(name: str, value: Any, otherwise: float) -> float:
    if value is None:
        return otherwise
    if not isinstance(value, int | float):
        raise UserError(f"the target's config: {name} is {value!r}, wanted a number")
    return float(value)
