"""One training step of Medusa-1 heads: soft cross-entropy of every head, the target frozen.

Source: Medusa (arXiv 2401.10774), section 2.2.1, with the target's distribution as the label in place of the
text's next tokens: on text that the target wrote the two agree in their first choice, and it says more.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from eagle_train.heads.draft_vocab import to_draft
from eagle_train.heads.medusa import MedusaHead
from eagle_train.losses.vocabulary import vocabulary_loss
from eagle_train.training.step_result import StepResult, nothing_counted, step_weights

if TYPE_CHECKING:
    from eagle_train.shards.batches import PackedBatch
    from eagle_train.shards.frozen_target import FrozenTarget


class MedusaStep(nn.Module):
    """Computes the loss of one micro-batch; step i is head i, weighted step_decay ** i."""

    def __init__(
        self,
        head: MedusaHead,
        frozen: FrozenTarget,
        *,
        step_decay: float = 0.8,
        divergence: str = "cross_entropy",
        top_k: tuple[int, float] | None = None,
    ) -> None:
        super().__init__()
        self.head, self.step_decay = head, step_decay
        self.divergence, self.top_k = divergence, top_k
        self.num_steps = head.config.medusa_heads
        self.teacher = frozen.restrict(head.draft_ids)  # draft-vocabulary rows of the output map
        self.draft_of = to_draft(head.draft_ids, head.config.vocab_size)

    def forward(self, batch: PackedBatch, counts: Tensor, counted: Tensor | None = None) -> StepResult:
        """Return the batch's loss; `counts` [S] are the rows counted in the whole optimizer step.

        `counted` [S, C] bool narrows what counts at each step. Rows whose most likely target token lies
        outside the draft vocabulary carry no loss, but stay in every number.
        """
        if not len(batch.rows):
            return nothing_counted(self.head, self.num_steps, batch.input_ids.device)
        weights, parts, sums, hits, rows = step_weights(counts, self.step_decay), [], [], [], []
        for i in range(self.num_steps):
            counts_here = batch.room > i if counted is None else counted[i] & (batch.room > i)
            index = counts_here.nonzero().flatten()  # row t, whose head i guesses x[t+2+i]
            label = batch.label0[index] + i
            best = self.draft_of[batch.label_argmax[label]]
            kept = (best >= 0).nonzero().flatten()
            result = vocabulary_loss(
                self.head(self.head.states(batch, index[kept]), i),
                self.head.lm_heads[i].weight,  # type: ignore[arg-type]
                self.teacher,
                batch.label_last,
                label[kept],
                best[kept],
                weights[i].expand(len(kept)),
                divergence=self.divergence,
                top_k=self.top_k,
            )
            parts.append(result.loss)
            sums.append(result.rows.sum())
            hits.append(result.hits.sum())
            rows.append(torch.tensor(len(index), device=counts.device))
        return StepResult(torch.stack(parts).sum(), torch.stack(sums), torch.stack(hits), torch.stack(rows))
