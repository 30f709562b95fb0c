"""The EAGLE-3 head: several target layers fused, one decoder layer, an own reduced lm_head.

Source: EAGLE-3 (arXiv 2503.01840), section 3; the two norms of EAGLE-3.1 as switches.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from eagle_train.heads.config import HeadConfig
from eagle_train.heads.draft_vocab import membership
from eagle_train.heads.layer import Attend, Layer, run_further_layers
from eagle_train.heads.norm import RMSNorm
from eagle_train.heads.rotary import Rotary

if TYPE_CHECKING:
    from eagle_train.shards.frozen_target import FrozenTarget


class MidLayer(Layer):
    """The first layer: reads the normed embedding beside the normed feature, 2H wide."""

    def __init__(self, config: HeadConfig) -> None:
        super().__init__(config, 0, width=2 * config.hidden_size, own_norm=True)
        self.hidden_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.norm_before_residual = config.norm_before_residual

    def inputs(self, hidden: Tensor, embeds: Tensor) -> tuple[Tensor, Tensor]:
        """Return what attention reads [.., 2H], the embedding first, and the residual stream [.., H]."""
        normed = self.hidden_norm(hidden)
        read = torch.cat([self.input_layernorm(embeds.to(normed.dtype)), normed], dim=-1)
        return read, normed if self.norm_before_residual else hidden


class Eagle3Head(nn.Module):
    """Predicts draft tokens from fused target features and its own earlier outputs."""

    draft_ids: Tensor  # [D] int64, target id of each draft id, ascending
    in_draft: Tensor  # [V] bool, which target ids can be drafted

    def __init__(self, config: HeadConfig, draft_ids: Tensor | None = None) -> None:
        super().__init__()
        assert config.kind == "eagle3"
        if draft_ids is None:
            assert not config.reduced_vocabulary, "a reduced vocabulary needs its draft ids"
            draft_ids = torch.arange(config.vocab_size)
        assert len(draft_ids) == config.draft_vocab_size
        hidden = config.hidden_size
        self.config = config
        self.fc = nn.Linear(config.feature_width, hidden, bias=config.fc_bias)
        if config.norm_before_fc:
            self.input_norm = RMSNorm(config.feature_width, config.rms_norm_eps)
        if config.fc_norm:
            width = config.feature_width // config.num_features
            self.fc_norm = nn.ModuleList(
                [RMSNorm(width, config.rms_norm_eps) for _ in range(config.num_features)]
            )
        self.midlayer = MidLayer(config)
        self.layers = nn.ModuleDict(  # by their numbers, of which the midlayer has 0
            {
                str(i): Layer(config, i, width=hidden, own_norm=True)
                for i in range(1, config.num_hidden_layers)
            }
        )
        self.norm = RMSNorm(hidden, config.rms_norm_eps)
        self.lm_head = nn.Linear(hidden, config.draft_vocab_size, bias=False)
        self.register_buffer("draft_ids", draft_ids.long())
        self.register_buffer("in_draft", membership(draft_ids, config.vocab_size))
        self.rotary = Rotary(config)

    def start(self, features: Tensor) -> Tensor:
        """Fuse captured layers [.., F] into the hidden state of step 0 [.., H]."""
        if not torch.is_autocast_enabled(features.device.type):  # which casts by itself
            features = features.to(self.fc.weight.dtype)
        if self.config.norm_before_fc:
            features = self.input_norm(features)
        if self.config.fc_norm:
            parts = features.chunk(self.config.num_features, dim=-1)
            features = torch.cat([norm(x) for norm, x in zip(self.fc_norm, parts, strict=True)], dim=-1)
        return self.fc(features)

    def forward(
        self,
        hidden: Tensor,  # [.., H], of step 0 or carried
        embeds: Tensor,  # [.., H], raw rows of the target's embedding for the token that follows
        positions: Tensor,  # [..] int64
        attend: Attend,
        rows: Tensor | None = None,
    ) -> Tensor:
        """Return the pre-norm output [.., H]; of packed `rows` alone where given, k and v on all."""
        angles = self.rotary(positions)
        first = None if len(self.layers) else rows
        read, residual = self.midlayer.inputs(hidden, embeds)
        out = self.midlayer(read, residual, angles, attend, first)
        return run_further_layers(self.layers.values(), out, angles, attend, rows)

    def carry(self, out: Tensor) -> Tensor:
        """Return the hidden state that the next step reads at the same row."""
        return self.norm(out) if self.config.norm_output else out

    def final(self, out: Tensor) -> Tensor:
        """Return what the output map reads, [.., H]."""
        return self.norm(out)

    def logits(self, out: Tensor, frozen: FrozenTarget) -> Tensor:
        """Return draft logits [.., D] of a pre-norm output."""
        return self.lm_head(self.final(out))

    def target_ids(self, draft_ids: Tensor) -> Tensor:
        """Translate draft ids to target ids, any shape."""
        return self.draft_ids[draft_ids] if self.config.reduced_vocabulary else draft_ids
