"""One training step of an EAGLE-3 head: training-time test, soft cross-entropy over the draft vocabulary.

Source: EAGLE-3 (arXiv 2503.01840), section 3.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor, nn

from eagle_train.heads.draft_vocab import to_draft
from eagle_train.heads.eagle3 import Eagle3Head
from eagle_train.heads.ttt import unroll
from eagle_train.losses.top_labels import TopLabels
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


class Eagle3Step(nn.Module):
    """Computes the loss of one micro-batch. The head is its only trainable part."""

    def __init__(
        self,
        head: Eagle3Head,
        frozen: FrozenTarget,
        *,
        num_steps: int = 7,
        step_decay: float = 0.8,
        divergence: str = "cross_entropy",
        top_k: tuple[int, float] | None = None,
    ) -> None:
        super().__init__()
        self.head, self.frozen = head, frozen
        self.num_steps, self.step_decay = num_steps, step_decay
        self.divergence, self.top_k = divergence, top_k
        self.teacher = frozen.restrict(head.draft_ids)  # draft-vocabulary rows of the output map
        self.draft_of = to_draft(head.draft_ids, head.config.vocab_size)

    def forward(self, batch: PackedBatch, counts: Tensor, counted: Tensor | None = None) -> StepResult:
        """Return the batch's loss; `counts` [S] are the rows counted in the whole optimizer step.

        `counted` [S, C] bool narrows what counts at each step (C entries of batch.rows). Rows whose most
        likely target token lies outside the draft vocabulary carry no loss, but stay in every number.
        """
        steps = list(unroll(self.head, self.frozen, batch, self.num_steps, counted))
        if not steps:
            return nothing_counted(self.head, self.num_steps, batch.input_ids.device)
        found = CountedRows.of(steps, batch, self.num_steps)
        best = self.draft_of[batch.label_argmax[found.label]]
        kept = (best >= 0).nonzero().flatten()
        step = found.step[kept]
        labels: Tensor | TopLabels = batch.label_last
        if batch.label_ids is not None and batch.label_logp is not None:
            labels = TopLabels(batch.label_ids, batch.label_logp, self.draft_of, len(self.head.draft_ids))
        result = vocabulary_loss(
            self.head.final(found.out[kept]),
            self.head.lm_head.weight,
            self.teacher,
            labels,
            found.label[kept],
            best[kept],
            step_weights(counts, self.step_decay)[step],
            divergence=self.divergence,
            top_k=self.top_k,
        )
        return StepResult(
            result.loss,
            per_step(result.rows, step, self.num_steps),
            per_step(result.hits.long(), step, self.num_steps),
            found.rows,
        )
