"""The weights in training: gradients summed over processes, the update, what is evaluated and saved."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from eagle_train.config import OptimRecipe
from eagle_train.heads.disk import Head
from eagle_train.io.tensors import load_tensors
from eagle_train.training.average import Average
from eagle_train.training.checkpoints import TENSORS
from eagle_train.training.optim import Optimizers
from eagle_train.training.processes import Processes
from eagle_train.training.step_result import StepResult
from eagle_train.training.steps import Step

if TYPE_CHECKING:
    from eagle_train.shards.batches import PackedBatch


class Engine:
    """Float32 weights on every process, gradients averaged among them after the last forward of a window."""

    def __init__(self, processes: Processes, step: Step, recipe: OptimRecipe, dtype: torch.dtype) -> None:
        self.processes, self.head, self.dtype = processes, step.head, dtype
        self.optimizers = Optimizers(step.head, recipe)
        self.average = Average(step.head, recipe.ema) if recipe.ema else None
        self._step = processes.wrap(step)

    def autocast(self) -> torch.autocast:
        """Enter the precision of the arithmetic; weights stay float32."""
        return torch.autocast(self.processes.device.type, self.dtype, enabled=self.dtype != torch.float32)

    def accumulate(self, batch: PackedBatch, counts: Tensor, closes: bool) -> StepResult:
        """Add one micro-batch's gradient to the window's; `closes` says that it is the last of it."""
        with self.processes.gradients(self._step, synchronise=closes):
            with self.autocast():
                result = self._step(batch, counts)
            (result.loss * self.processes.world).backward()  # processes average; the sum is wanted
        return result

    def update(self, factor: float) -> float:
        """Take the step at `factor` times the peak learning rates, unless the gradient is not finite.

        Returns the gradient's norm before clipping.
        """
        norm = self.optimizers.clip()
        if math.isfinite(norm):
            self.optimizers.step(factor)
            if self.average is not None:
                self.average.update()
        self.optimizers.zero()
        return norm

    @contextmanager
    def evaluated(self) -> Iterator[Head]:
        """Give the head with the weights that count: the average where there is one."""
        with self.average.in_place() if self.average is not None else nullcontext(), torch.no_grad():
            yield self.head

    @contextmanager
    def saved(self) -> Iterator[tuple[Head, dict[str, Tensor]]]:
        """Give what a checkpoint holds: the head to evaluate, and the tensors that going on needs."""
        trainer = self.optimizers.state()
        if self.average is not None:
            trainer |= self.average.state()
        with self.evaluated() as head:
            yield head, trainer

    def load(self, folder: Path) -> None:
        """Go on from a checkpoint whose head this engine was made of. Raises UserError."""
        tensors, _ = load_tensors(folder / TENSORS)
        if self.average is not None:
            self.average.load(tensors)
        self.optimizers.load(tensors, str(folder / TENSORS))
