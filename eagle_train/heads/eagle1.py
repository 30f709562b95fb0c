"""The EAGLE-1 head: predicts the target's next last state; embedding and lm_head are the target's.

Source: EAGLE (arXiv 2401.15077), section 3.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from eagle_train.heads.config import HeadConfig
from eagle_train.heads.layer import Attend, Layer, run_further_layers
from eagle_train.heads.rotary import Rotary

if TYPE_CHECKING:
    from eagle_train.shards.frozen_target import FrozenTarget


class Eagle1Head(nn.Module):
    """Predicts f[t+1], the target's state after its final norm, from f[t] and the token that follows."""

    draft_ids: Tensor  # [V] int64, the identity: the whole vocabulary is drafted
    in_draft: Tensor  # [V] bool, all true

    def __init__(self, config: HeadConfig) -> None:
        super().__init__()
        assert config.kind == "eagle1"
        hidden = config.hidden_size
        self.config = config
        self.fc = nn.Linear(2 * hidden, hidden, bias=config.fc_bias)
        self.layers = nn.ModuleList(
            [Layer(config, i, width=hidden, own_norm=i > 0) for i in range(config.num_hidden_layers)]
        )
        self.register_buffer("draft_ids", torch.arange(config.vocab_size), persistent=False)
        self.register_buffer("in_draft", torch.ones(config.vocab_size, dtype=torch.bool), persistent=False)
        self.rotary = Rotary(config)

    def start(self, features: Tensor) -> Tensor:
        """Return the features themselves [.., H]: f is what the head reads."""
        return features.to(self.fc.weight.dtype)

    def forward(
        self,
        hidden: Tensor,  # [.., H], f[t] or its prediction
        embeds: Tensor,  # [.., H], raw rows of the target's embedding for the token that follows
        positions: Tensor,  # [..] int64
        attend: Attend,
        rows: Tensor | None = None,
    ) -> Tensor:
        """Return the predicted f[t+1], [.., H]; of packed `rows` alone where given, k and v on all."""
        angles = self.rotary(positions)
        fused = self.fc(torch.cat([embeds.to(hidden.dtype), hidden], dim=-1))  # [.., 2H] -> [.., H]
        first = None if len(self.layers) > 1 else rows
        out = self.layers[0](fused, fused, angles, attend, first)
        return run_further_layers(list(self.layers)[1:], out, angles, attend, rows)

    def carry(self, out: Tensor) -> Tensor:
        """Return the hidden state that the next step reads at the same row: the prediction itself."""
        return out

    def logits(self, out: Tensor, frozen: FrozenTarget) -> Tensor:
        """Return logits over the whole vocabulary [.., V] through the target's own output map."""
        return frozen.logits(out)

    def target_ids(self, draft_ids: Tensor) -> Tensor:
        """Return the ids themselves: the whole vocabulary is drafted."""
        return draft_ids
