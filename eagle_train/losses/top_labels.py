"""The target's distribution from its k likeliest tokens alone, as shards with top labels hold it.

Legend: M label positions, k tokens stored for each, D draft vocabulary. The stored log-probabilities are over
the whole vocabulary, so the mass r = 1 - sum p of what is not stored is known. Inside the draft vocabulary
stored tokens keep their probability, r is spread evenly over the draft tokens not stored, none of them made
likelier than the last one stored, and the whole is renormalised. That is exact where k is the vocabulary;
else it differs from the true distribution over the draft vocabulary by at most r / (s + r) in total
variation, s being the stored mass inside the draft vocabulary: the true one has 0 to r beside it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

_LEAST = 1e-30  # of the mass not stored: its logarithm stays finite


@dataclass(frozen=True)
class TopLabels:
    """The labels of a batch, and where their tokens lie in the draft vocabulary."""

    ids: Tensor  # [M, k] integers, the likeliest first
    logp: Tensor  # [M, k] log-probabilities over the whole vocabulary
    draft_of: Tensor  # [V] int64, the draft id of each token, -1 outside the draft vocabulary
    width: int  # D

    def logits(self, which: Tensor) -> Tensor:
        """Return float32 logits [n, D] of the labels `which` [n]: their softmax is the distribution."""
        ids, logp = self.ids[which].long(), self.logp[which].float()
        at = self.draft_of[ids]  # [n, k]
        inside = at >= 0
        rest = (1 - logp.exp().sum(-1, keepdim=True)).clamp(min=_LEAST)
        others = (self.width - inside.sum(-1, keepdim=True)).clamp(min=1)
        evenly = torch.minimum((rest / others).log(), logp[:, -1:])  # [n, 1]
        found = evenly.repeat(1, self.width + 1)  # the last column takes what lies outside
        return found.scatter_(1, torch.where(inside, at, self.width), logp)[:, : self.width]
