"""One training step of an EAGLE-1 head: regress the next feature, and a share of cross-entropy through it.

Source: EAGLE (arXiv 2401.15077), section 3.2; the input noise is the reference code's.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from eagle_train.heads.eagle1 import Eagle1Head
from eagle_train.heads.ttt import unroll
from eagle_train.losses.regression import smooth_l1_rows
from eagle_train.losses.vocabulary import vocabulary_loss
from eagle_train.training.step_result import StepResult, nothing_counted
from eagle_train.training.teacher import Teacher

if TYPE_CHECKING:
    from eagle_train.shards.batches import PackedBatch
    from eagle_train.shards.frozen_target import FrozenTarget

_NOISE_LENGTH = 512  # the sequence length at which the noise has its nominal amplitude


class Eagle1Step(nn.Module):
    """Computes the loss of one micro-batch. The head is its only trainable part.

    The noise has its own random generator, `noise_generator`, so that it neither disturbs nor depends on
    any other randomness; a loop that must resume exactly seeds it before each batch.
    """

    num_steps = 1

    def __init__(
        self,
        head: Eagle1Head,
        frozen: FrozenTarget,
        *,
        feature_weight: float = 1.0,
        token_weight: float = 0.1,
        noise: float = 0.1,
        noise_seed: int = 0,
    ) -> None:
        super().__init__()
        self.head, self.frozen, self.teacher = head, frozen, Teacher(frozen)
        self.feature_weight, self.token_weight, self.noise = feature_weight, token_weight, noise
        self.noise_generator = torch.Generator().manual_seed(noise_seed)

    def forward(self, batch: PackedBatch, counts: Tensor, counted: Tensor | None = None) -> StepResult:
        """Return the batch's loss; `counts` [1] are the rows counted in the whole optimizer step.

        `counted` [1, C] bool narrows which entries of batch.rows count.
        """
        if self.training and self.noise > 0:
            batch = with_noise(batch, self.noise, self.noise_generator)
        step = next(iter(unroll(self.head, self.frozen, batch, 1, counted)), None)
        if step is None:
            return nothing_counted(self.head, 1, batch.input_ids.device)
        label, teacher = batch.label0[step.index], self.teacher()
        share = (1 / counts[0].clamp(min=1)).float()
        feature_loss = smooth_l1_rows(step.out, batch.label_last[label])  # [C]
        token_loss = vocabulary_loss(
            step.out,
            teacher.lm_head,
            teacher,
            batch.label_last,
            label,
            batch.label_argmax[label],
            (self.token_weight * share).expand(len(label)),
            own_map=False,
        )
        sums = self.feature_weight * feature_loss.detach().sum() + self.token_weight * token_loss.rows.sum()
        return StepResult(
            self.feature_weight * feature_loss.sum() * share + token_loss.loss,
            sums[None],
            token_loss.hits.sum()[None],
            torch.tensor([len(label)], device=counts.device),
        )


def with_noise(batch: PackedBatch, amplitude: float, generator: torch.Generator) -> PackedBatch:
    """Return the batch with uniform noise in (-amplitude, amplitude) * 512 / L added to its features.

    L is the length of each document.
    """
    uniform = torch.rand(batch.feature.shape, generator=generator).to(batch.feature.device)
    return replace(batch, feature=noisy(batch.feature, uniform, batch.row_starts, amplitude))


def noisy(feature: Tensor, uniform: Tensor, row_starts: Tensor, amplitude: float) -> Tensor:
    """Return feature [N, H] plus noise made of `uniform` [N, H] in [0, 1)."""
    lengths = row_starts.diff()
    scale = (2 * amplitude * _NOISE_LENGTH / lengths).repeat_interleave(lengths)  # [N]
    return feature + ((uniform - 0.5) * scale[:, None]).to(feature.dtype)
