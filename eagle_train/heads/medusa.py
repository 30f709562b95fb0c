"""Medusa-1 heads: each guesses one token further ahead from the target's last state, none sees the others.

Source: Medusa (arXiv 2401.10774), section 2.1.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from eagle_train.heads.config import HeadConfig
from eagle_train.heads.draft_vocab import membership

if TYPE_CHECKING:
    from eagle_train.shards.batches import PackedBatch
    from eagle_train.shards.frozen_target import FrozenTarget


class MedusaHead(nn.Module):
    """`medusa_heads` residual blocks, each with an output map over the draft vocabulary.

    From f[t], the target's state after its final norm having read x[t], head i guesses x[t+2+i]; the target
    itself gives x[t+1]. A new block's weights are 0, so that every head begins as its output map alone.
    """

    draft_ids: Tensor  # [D] int64, target id of each draft id, ascending
    in_draft: Tensor  # [V] bool, which target ids can be drafted

    def __init__(self, config: HeadConfig, draft_ids: Tensor | None = None) -> None:
        super().__init__()
        assert config.kind == "medusa"
        draft_ids = torch.arange(config.vocab_size) if draft_ids is None else draft_ids
        assert len(draft_ids) == config.draft_vocab_size
        hidden, count = config.hidden_size, config.medusa_heads
        self.config = config
        self.blocks = nn.ModuleList([nn.Linear(hidden, hidden) for _ in range(count)])
        self.lm_heads = nn.ModuleList(
            [nn.Linear(hidden, config.draft_vocab_size, bias=False) for _ in range(count)]
        )
        for block in self.blocks:
            nn.init.zeros_(block.weight)  # type: ignore[arg-type]
            nn.init.zeros_(block.bias)  # type: ignore[arg-type]
        self.register_buffer("draft_ids", draft_ids.long())
        self.register_buffer("in_draft", membership(draft_ids, config.vocab_size))

    def forward(self, last: Tensor, number: int) -> Tensor:
        """Return what output map `number` reads, [.., H], of states f[t] [.., H]."""
        if not torch.is_autocast_enabled(last.device.type):
            last = last.to(next(self.parameters()).dtype)
        return last + nn.functional.silu(self.blocks[number](last))

    def logits(self, out: Tensor, frozen: FrozenTarget, number: int = 0) -> Tensor:
        """Return draft logits [.., D] of `forward`'s output of head `number`."""
        return self.lm_heads[number](out)

    def target_ids(self, draft_ids: Tensor) -> Tensor:
        """Translate draft ids to target ids, any shape."""
        return self.draft_ids[draft_ids] if self.config.reduced_vocabulary else draft_ids

    def states(self, batch: PackedBatch, index: Tensor) -> Tensor:
        """Return f[t] [.., H] of entries `index` of batch.rows: the label position before that of step 0."""
        return batch.label_last[batch.label0[index] - 1]
