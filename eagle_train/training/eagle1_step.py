"""One training step of an EAGLE-1 head: regress the next feature, and a share of cross-entropy through it.

Source: EAGLE (arXiv 2401.15077), section 3.2; the input noise is the reference code's. With more than one
step the head also learns from its own predictions at the rows that drafting would give them, as in HASS
(arXiv 2408.15766).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor, nn

from eagle_train.heads.eagle1 import Eagle1Head
from eagle_train.heads.ttt import unroll
from eagle_train.losses.regression import smooth_l1_rows
from eagle_train.losses.vocabulary import vocabulary_loss
from eagle_train.training.step_result import (
    CountedRows,
    StepResult,
    nothing_counted,
    per_step,
    step_weights,
)

if TYPE_CHECKING:
    from eagle_train.shards.batches import PackedBatch
    from eagle_train.shards.frozen_target import FrozenTarget

_NOISE_LENGTH = 512  # the sequence length at which the noise has its nominal amplitude


class Eagle1Step(nn.Module):
    """Computes the loss of one micro-batch. The head is its only trainable part."""

    def __init__(
        self,
        head: Eagle1Head,
        frozen: FrozenTarget,
        *,
        num_steps: int = 1,
        step_decay: float = 1.0,
        feature_weight: float = 1.0,
        token_weight: float = 0.1,
        divergence: str = "cross_entropy",
        top_k: tuple[int, float] | None = None,
    ) -> None:
        super().__init__()
        self.head, self.frozen = head, frozen
        self.num_steps, self.step_decay = num_steps, step_decay
        self.feature_weight, self.token_weight = feature_weight, token_weight
        self.divergence, self.top_k = divergence, top_k

    def forward(self, batch: PackedBatch, counts: Tensor, counted: Tensor | None = None) -> StepResult:
        """Return the batch's loss; `counts` [S] are the rows counted in the whole optimizer step.

        `counted` [S, C] bool narrows which entries of batch.rows count.
        """
        steps = list(unroll(self.head, self.frozen, batch, self.num_steps, counted))
        if not steps:
            return nothing_counted(self.head, self.num_steps, batch.input_ids.device)
        found = CountedRows.of(steps, batch, self.num_steps)
        row_weight = step_weights(counts, self.step_decay)[found.step]
        feature_rows = self.feature_weight * smooth_l1_rows(found.out, batch.label_last[found.label])  # [R]
        token_loss = vocabulary_loss(
            found.out,
            self.frozen.lm_head,
            self.frozen,
            batch.label_last,
            found.label,
            batch.label_argmax[found.label],
            self.token_weight * row_weight,
            own_map=False,
            divergence=self.divergence,
            top_k=self.top_k,
        )
        rows = feature_rows.detach() + self.token_weight * token_loss.rows
        return StepResult(
            (feature_rows * row_weight).sum() + token_loss.loss,
            per_step(rows, found.step, self.num_steps),
            per_step(token_loss.hits.long(), found.step, self.num_steps),
            found.rows,
        )


def noisy(feature: Tensor, uniform: Tensor, row_starts: Tensor, amplitude: float) -> Tensor:
    """Return feature [N, H] plus noise in (-amplitude, amplitude) * 512 / L, L each document's length.

    `uniform` [N, H] in [0, 1) is what the noise is made of.
    """
    lengths = row_starts.diff()
    scale = (2 * amplitude * _NOISE_LENGTH / lengths).repeat_interleave(lengths)  # [N]
    return feature + ((uniform - 0.5) * scale[:, None]).to(feature.dtype)
