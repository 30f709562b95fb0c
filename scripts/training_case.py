"""A training step on one random document: its sizes, its head and batch, its arithmetic, its naive twin."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from eagle_train.heads.config import HeadConfig
from eagle_train.heads.disk import build_head
from eagle_train.heads.eagle3 import Eagle3Head
from eagle_train.shards.batches import PackedBatch, counted_rows, pack
from eagle_train.shards.frozen_target import FrozenTarget
from eagle_train.shards.row_source import ShardRow

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


@dataclass(frozen=True)
class Case:
    """One document of `length` tokens, the last `share` of whose rows count."""

    length: int
    draft_vocab: int
    share: float
    dtype: str

    @classmethod
    def of(cls, text: str) -> Case:
        length, draft_vocab, share, dtype = text.split(",")
        return cls(int(length), int(draft_vocab), float(share), dtype)


@dataclass(frozen=True)
class Sizes:
    """H, I, heads, key-value heads, head dimension, V and S of the training-time test."""

    hidden: int = 576
    intermediate: int = 1536
    heads: int = 9
    kv_heads: int = 3
    head_dim: int = 64
    vocab: int = 49152
    steps: int = 7


def build(case: Case, sizes: Sizes, device: str) -> tuple[Eagle3Head, FrozenTarget, PackedBatch, Tensor]:
    """Return head, target, batch and counts of a case, all random."""
    torch.manual_seed(0)
    target = {
        "hidden_size": sizes.hidden,
        "intermediate_size": sizes.intermediate,
        "num_hidden_layers": 30,
        "num_attention_heads": sizes.heads,
        "num_key_value_heads": sizes.kv_heads,
        "head_dim": sizes.head_dim,
        "vocab_size": sizes.vocab,
        "max_position_embeddings": max(2048, case.length),
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e5},
    }
    config = HeadConfig.for_target(target, "eagle3", draft_vocab_size=case.draft_vocab)
    ids = torch.randperm(sizes.vocab)[: case.draft_vocab].sort().values
    head = build_head(config, ids if config.reduced_vocabulary else None)
    assert isinstance(head, Eagle3Head)
    dtype = DTYPES[case.dtype]
    weights = torch.randn(sizes.vocab, sizes.hidden).mul_(0.1).to(dtype)
    frozen = FrozenTarget(weights, weights)
    first = max(1, round(case.length * (1 - case.share)))
    spans = [(first, case.length - 1)]
    labels = case.length - first
    document = ShardRow(
        input_ids=ids[torch.randint(len(ids), (case.length,))],
        spans=spans,
        aux=torch.randn(case.length, 3 * sizes.hidden).to(dtype),
        last_all=None,
        label_last=torch.randn(labels, sizes.hidden).to(dtype),
        label_argmax=ids[torch.randint(len(ids), (labels,))],
        label_lse=torch.zeros(labels),
    )
    batch = pack([document], "eagle3").to(device)
    counts = torch.tensor(counted_rows(spans, sizes.steps), device=device)
    return head.to(device), frozen.to(device), batch, counts


class Naive(nn.Module):
    """The training-time test as public trainers have it: all rows, a dense mask, whole logits."""

    def __init__(self, head: Eagle3Head, frozen: FrozenTarget, num_steps: int) -> None:
        super().__init__()
        self.head, self.frozen, self.num_steps = head, frozen, num_steps

    def forward(self, batch: PackedBatch, counts: Tensor) -> Tensor:
        head, n, rows = self.head, batch.num_tokens, batch.rows
        hidden, ids = head.start(batch.feature), batch.next_ids
        causal = torch.ones((n, n), dtype=torch.bool, device=ids.device).tril()
        own = torch.eye(n, dtype=torch.bool, device=ids.device)
        last = torch.zeros((n, batch.label_last.shape[1]), dtype=batch.label_last.dtype, device=ids.device)
        last[rows[0] :][: len(batch.label_last)] = batch.label_last
        p = self.frozen.restrict(head.draft_ids).logits(last).float().softmax(-1)  # (N, D)
        keys: list[tuple[Tensor, Tensor]] = []
        total = torch.zeros((), device=ids.device)
        for step in range(self.num_steps):

            def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
                keys.append((k, v))
                seen = torch.cat([causal, *[own] * (len(keys) - 1)], dim=1)
                together = [torch.cat(parts).transpose(0, 1)[None] for parts in zip(*keys, strict=True)]
                every_k, every_v = (x.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for x in together)
                bias = torch.zeros(seen.shape, dtype=q.dtype, device=q.device).masked_fill_(~seen, -1e30)
                out = nn.functional.scaled_dot_product_attention(
                    q.transpose(0, 1)[None], every_k, every_v, attn_mask=bias
                )
                return out[0].transpose(0, 1)

            out = head(hidden, self.frozen.embed(ids), batch.position + step, attend)
            log_q = head.logits(out, self.frozen).float().log_softmax(-1)  # (N, D)
            loss = -(p.roll(-step - 1, 0) * log_q).sum(-1)
            counted = rows[batch.room > step]
            total = total + 0.8**step * loss[counted].sum() / counts[step].clamp(min=1)
            hidden, ids = head.carry(out), ids.roll(-1)
        return total


def arithmetic(case: Case, sizes: Sizes) -> float:
    """Return the operations that counted rows cost in forward and backward."""
    h, wide = sizes.hidden, sizes.heads * sizes.head_dim
    narrow = sizes.kv_heads * sizes.head_dim
    first = max(1, round(case.length * (1 - case.share)))
    rows = counted_rows([(first, case.length - 1)], sizes.steps)
    read = case.length - 2  # rows whose keys step 0 needs
    own = 2 * (2 * h * wide + wide * h + 3 * h * sizes.intermediate + h * case.draft_vocab)
    step0 = read * 2 * (3 * h * h + 2 * 2 * h * narrow) + 4 * wide * sum(range(first, case.length - 1))
    later = sum(count * 2 * 2 * 2 * h * narrow for count in rows[1:])
    later += sum(4 * wide * sum(range(first, first + count)) for count in rows[1:])
    teacher = 2 * (case.length - first) * h * case.draft_vocab
    return 3 * (sum(rows) * own + step0 + later) + teacher
