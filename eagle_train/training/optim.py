"""Optimizers of a head, their state by parameter name, and the learning rate over a run."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from eagle_train.config import OptimRecipe, ScheduleRecipe
from eagle_train.errors import UserError


class Optimizers:
    """AdamW on all parameters, or Muon on the matrices of fc and layers beside AdamW on the rest.

    Muon: https://kellerjordan.github.io/posts/muon, as torch.optim.Muon has it.
    """

    def __init__(self, head: nn.Module, recipe: OptimRecipe) -> None:
        self.recipe = recipe
        self.names = {parameter: name for name, parameter in head.named_parameters()}
        matrices = [p for p, name in self.names.items() if recipe.name == "muon" and is_matrix(name, p)]
        chosen = set(matrices)
        rest = [p for p in self.names if p not in chosen]
        self.parts: list[torch.optim.Optimizer] = []
        if matrices:
            self.parts.append(_muon(matrices, recipe))
        if rest:
            self.parts.append(
                torch.optim.AdamW(
                    rest,
                    lr=recipe.lr,
                    betas=recipe.betas,
                    eps=recipe.eps,
                    weight_decay=recipe.weight_decay,
                    fused=True,
                )
            )
        self._peaks = [part.param_groups[0]["lr"] for part in self.parts]

    def clip(self) -> float:
        """Scale the whole gradient down to recipe.clip_norm; return its norm before (maybe not finite)."""
        limit = self.recipe.clip_norm or math.inf
        return float(torch.nn.utils.clip_grad_norm_(list(self.names), limit))

    def step(self, factor: float) -> None:
        """Update the weights at `factor` times the peak learning rates."""
        for part, peak in zip(self.parts, self._peaks, strict=True):
            part.param_groups[0]["lr"] = peak * factor
            part.step()

    def zero(self) -> None:
        """Drop all gradients."""
        for part in self.parts:
            part.zero_grad(set_to_none=True)

    def state(self) -> dict[str, Tensor]:
        """Return the whole state as tensors named ``parameter/quantity``."""
        return {
            f"{name}/{key}": value
            for part in self.parts
            for parameter, name in self._of(part)
            for key, value in part.state[parameter].items()
        }

    def load(self, state: dict[str, Tensor], where: str) -> None:
        """Take up a state that `state` gave; UserError where it belongs to other parameters."""
        parts = {name: (part, p) for part in self.parts for p, name in self._of(part)}
        for entry, value in state.items():
            name, _, key = entry.rpartition("/")
            if name not in parts:
                raise UserError(f"{where}: optimizer state for unknown parameter '{name}'; not this head's")
            part, parameter = parts[name]
            part.state[parameter][key] = value.to(parameter.device)

    def _of(self, part: torch.optim.Optimizer) -> list[tuple[nn.Parameter, str]]:
        by_id = {id(p): (p, name) for p, name in self.names.items()}
        return [by_id[id(p)] for group in part.param_groups for p in group["params"]]


def is_matrix(name: str, parameter: Tensor) -> bool:
    """True for what Muon is made for: matrices between hidden states. lm_head and norms are not."""
    return parameter.ndim == 2 and not name.startswith("lm_head")


def _muon(matrices: list[nn.Parameter], recipe: OptimRecipe) -> torch.optim.Optimizer:
    return torch.optim.Muon(
        matrices,
        lr=recipe.matrix_lr,
        momentum=recipe.matrix_momentum,
        weight_decay=recipe.matrix_weight_decay,
    )


def lr_factor(schedule: ScheduleRecipe, step: int, num_steps: int | None, time_share: float) -> float:
    """Return the share of the peak learning rate for the step after `step` steps, in [final, 1].

    Linear warm-up, then decay as far as the run has come: by steps after the warm-up, or by the share of
    its minutes, whichever is further.
    """
    warm = min(1.0, (step + 1) / schedule.warmup_steps) if schedule.warmup_steps else 1.0
    done = max(0.0, min(1.0, time_share))
    if num_steps is not None and step > schedule.warmup_steps:
        done = max(done, (step - schedule.warmup_steps) / max(1, num_steps - schedule.warmup_steps))
    left = {
        "cosine": 0.5 * (1 + math.cos(math.pi * done)),
        "linear": 1 - done,
        "constant": 1.0,
        "wsd": min(1.0, (1 - done) / schedule.decay_share),
    }
    return warm * (schedule.final + (1 - schedule.final) * left[schedule.shape])
