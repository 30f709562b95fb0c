"""One training step of an EAGLE-3 head: training-time test, soft cross-entropy over the draft vocabulary.

Source: EAGLE-3 (arXiv 2503.01840), section 3.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from eagle_train.heads.eagle3 import Eagle3Head
from eagle_train.heads.ttt import unroll
from eagle_train.losses.vocabulary import vocabulary_loss
from eagle_train.training.step_result import StepResult, nothing_counted, per_step
from eagle_train.training.teacher import Teacher

if TYPE_CHECKING:
    from eagle_train.shards.batches import PackedBatch
    from eagle_train.shards.frozen_target import FrozenTarget


class Eagle3Step(nn.Module):
    """Computes the loss of one micro-batch. The head is its only trainable part."""

    def __init__(
        self, head: Eagle3Head, frozen: FrozenTarget, *, num_steps: int = 7, step_decay: float = 0.8
    ) -> None:
        super().__init__()
        self.head, self.frozen = head, frozen
        self.num_steps, self.step_decay = num_steps, step_decay
        self.teacher = Teacher(frozen.restrict(head.draft_ids))  # draft-vocabulary rows of the output map
        draft_of = torch.full((head.config.vocab_size,), -1, dtype=torch.int64)
        draft_of[head.draft_ids.cpu()] = torch.arange(len(head.draft_ids))
        self.draft_of = draft_of.to(head.draft_ids.device)  # [V], draft id of each target id, -1 outside

    def forward(self, batch: PackedBatch, counts: Tensor, counted: Tensor | None = None) -> StepResult:
        """Return the batch's loss; `counts` [S] are the rows counted in the whole optimizer step.

        `counted` [S, C] bool narrows what counts at each step (C entries of batch.rows). Rows whose most
        likely target token lies outside the draft vocabulary carry no loss, but stay in every number.
        """
        steps = list(unroll(self.head, self.frozen, batch, self.num_steps, counted))
        if not steps:
            return nothing_counted(self.head, self.num_steps, batch.input_ids.device)
        outs = [s.out if s.counted is None else s.out[s.counted] for s in steps]
        index = [s.index if s.counted is None else s.index[s.counted] for s in steps]
        rows = torch.tensor([len(entry) for entry in index], device=counts.device)
        rows = nn.functional.pad(rows, (0, self.num_steps - len(rows)))  # [S]
        step = torch.arange(self.num_steps, device=rows.device).repeat_interleave(rows)  # [R]
        label = torch.cat([batch.label0[entry] for entry in index]) + step
        best = self.draft_of[batch.label_argmax[label]]
        kept = (best >= 0).nonzero().flatten()
        weight = self.step_decay ** torch.arange(self.num_steps, device=rows.device) / counts.clamp(min=1)
        result = vocabulary_loss(
            self.head.final(torch.cat(outs)[kept]),
            self.head.lm_head.weight,
            self.teacher(),
            batch.label_last,
            label[kept],
            best[kept],
            weight.float()[step[kept]],
        )
        return StepResult(
            result.loss,
            per_step(result.rows, step[kept], self.num_steps),
            per_step(result.hits.long(), step[kept], self.num_steps),
            rows,
        )
