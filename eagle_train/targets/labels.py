"""The target's labels at supervised positions: its most likely token, and the log-sum-exp of its logits."""

from __future__ import annotations

import torch
from torch import Tensor

from eagle_train.targets.load import Target

_BLOCK = 64
_MOST_LOGITS = {"cpu": 1 << 25, "cuda": 1 << 28}  # logits held at once
_CACHED_LOGITS = 1 << 19  # logits reduced at once on a CPU: they stay in its cache


def labels(target: Target, last: Tensor) -> tuple[Tensor, Tensor]:
    """Return (argmax int64 [m], log-sum-exp float32 [m]) of the target's logits of final states [m, H].

    The lm_head runs on pieces of rows, so that no tensor of m x V ever exists. The cut depends on V
    and the kind of device alone.
    """
    rows = rows_at_once(target, last.device)
    argmax = torch.empty(len(last), dtype=torch.int64, device=last.device)
    lse = torch.empty(len(last), dtype=torch.float32, device=last.device)
    for first in range(0, len(last), rows):
        piece = slice(first, first + rows)
        argmax[piece], lse[piece] = reduce_logits(target.logits(last[piece]))
    return argmax, lse


def top_labels(target: Target, last: Tensor, k: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return what `labels` does, and (ids int64 [m, k], log-probabilities float32 [m, k]) of the likeliest.

    The first is always the argmax; the probabilities are over the whole vocabulary.
    """
    rows = rows_at_once(target, last.device)
    argmax, lse = (last.new_empty(len(last), dtype=kind) for kind in (torch.int64, torch.float32))
    ids, logp = (last.new_empty(len(last), k, dtype=kind) for kind in (torch.int64, torch.float32))
    for first in range(0, len(last), rows):
        piece = slice(first, first + rows)
        logits = target.logits(last[piece])
        best, total = reduce_logits(logits)  # where the lm_head is, perhaps another GPU than `last`
        likely = likeliest(logits, best, k)
        argmax[piece], lse[piece], ids[piece] = best, total, likely
        logp[piece] = logits.gather(-1, likely).float() - total[:, None]
    return argmax, lse, ids, logp


def likeliest(logits: Tensor, argmax: Tensor, k: int) -> Tensor:
    """Return the ids [m, k] of the largest logits [m, V], `argmax` [m] first whatever ties with it."""
    first = argmax.to(logits.device)[:, None]
    return logits.scatter(-1, first, float("inf")).topk(k, dim=-1).indices


def rows_at_once(target: Target, device: torch.device) -> int:
    """Return how many positions the lm_head runs on at once."""
    return max(16, _MOST_LOGITS.get(device.type, 1 << 25) // target.vocab_size)


def reduce_logits(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Return (argmax, log-sum-exp in float32) of logits [m, V]; ties take the lowest id."""
    if logits.device.type != "cpu":
        logits = logits.float()
        return logits.argmax(-1), logits.logsumexp(-1)
    pieces = [_reduce(piece.float()) for piece in logits.split(max(1, _CACHED_LOGITS // logits.shape[-1]))]
    if not pieces:
        return torch.empty(0, dtype=torch.int64), torch.empty(0)
    argmax, lse = zip(*pieces, strict=True)
    return torch.cat(argmax), torch.cat(lse)


def _reduce(logits: Tensor) -> tuple[Tensor, Tensor]:
    """The same on a CPU, several times faster: vectorised maxima of blocks, and the fused log-softmax.

    ``lse = z[k] - log_softmax(z)[k]`` is taken at the largest logit k, where nothing cancels.
    """
    vocab = logits.shape[-1]
    if vocab % _BLOCK:
        best = logits.argmax(-1, keepdim=True)
    else:
        blocks = logits.unflatten(-1, (vocab // _BLOCK, _BLOCK))  # (m, V) -> (m, V / 64, 64)
        block = blocks.amax(-1).argmax(-1, keepdim=True)  # (m, 1) the first block that holds the maximum
        inside = blocks.take_along_dim(block[..., None], dim=1).squeeze(1).argmax(-1, keepdim=True)
        best = block * _BLOCK + inside
    lse = logits.gather(-1, best) - logits.log_softmax(-1).gather(-1, best)
    return best.squeeze(-1), lse.squeeze(-1)
