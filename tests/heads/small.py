"""Small random heads, targets and batches, and the dense twin of the training-time test's attention."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from eagle_train.heads.config import HeadConfig
from eagle_train.heads.disk import Head, build_head
from eagle_train.shards.batches import PackedBatch, pack
from eagle_train.shards.frozen_target import FrozenTarget
from eagle_train.shards.row_source import ShardRow

H, V, D = 32, 60, 40
TARGET = {
    "hidden_size": H,
    "intermediate_size": 48,
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,  # not H / heads
    "vocab_size": V,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 256,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
}
TWO_DOCUMENTS = [(23, [(4, 9), (13, 21)]), (17, [(6, 16)])]  # length, answer spans


def small_head(kind: str, seed: int = 0, **settings: Any) -> Head:
    """A head whose every weight, norms too, is random."""
    if kind == "eagle3":
        settings = {"draft_vocab_size": D, "feature_layers": (2, 4, 5)} | settings
    config = HeadConfig.for_target(TARGET, kind, **settings)
    generator = torch.Generator().manual_seed(seed)
    ids = None
    if config.reduced_vocabulary:
        ids = torch.randperm(V, generator=generator)[: config.draft_vocab_size].sort().values
    head = build_head(config, ids)
    with torch.no_grad():
        for parameter in head.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(1 + 0.3 * noise if parameter.dim() == 1 else noise * parameter.shape[1] ** -0.5)
    return head


def small_frozen(seed: int = 1, **settings: Any) -> FrozenTarget:
    generator = torch.Generator().manual_seed(seed)
    embedding, lm_head = torch.randn(2, V, H, generator=generator)
    return FrozenTarget(0.3 * embedding, 0.4 * lm_head, **settings)


def small_documents(
    frozen: FrozenTarget, shapes: list[tuple[int, list[tuple[int, int]]]], seed: int = 2
) -> list[ShardRow]:
    """Documents in the form of shard rows: random tokens, features and final states."""
    generator = torch.Generator().manual_seed(seed)
    documents = []
    for length, spans in shapes:
        last = torch.randn(length, H, generator=generator)
        at = torch.tensor([t for s, e in spans for t in range(s - 1, e)], dtype=torch.int64)
        logits = frozen.logits(last[at])
        documents.append(
            ShardRow(
                input_ids=torch.randint(V, (length,), generator=generator),
                spans=spans,
                aux=torch.randn(length, 3 * H, generator=generator),
                last_all=last,
                label_last=last[at],
                label_argmax=logits.argmax(-1),
                label_lse=logits.logsumexp(-1),
            )
        )
    return documents


def small_batch(
    kind: str,
    frozen: FrozenTarget,
    shapes: list[tuple[int, list[tuple[int, int]]]] = TWO_DOCUMENTS,
    seed: int = 2,
) -> PackedBatch:
    return pack(small_documents(frozen, shapes, seed), kind)


def softmax_attention(q: Tensor, k: Tensor, v: Tensor, seen: Tensor) -> Tensor:
    """Attention written out: q [C, heads, hd], k and v [K, kv heads, hd], seen [C, K] bool."""
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    scores = torch.einsum("chd,khd->hck", q, k) * q.shape[-1] ** -0.5
    weights = scores.masked_fill(~seen, float("-inf")).softmax(-1)
    return torch.einsum("hck,khd->chd", weights, v)


class DenseMemory:
    """The naive twin of heads.ttt.RunMemory: every key in one [C, K] matrix with a mask."""

    def __init__(self, starts: Tensor) -> None:
        self.document = torch.searchsorted(starts, torch.arange(int(starts[-1])), right=True)
        self.first: dict[int, tuple[Tensor, Tensor]] = {}
        self.own: dict[int, list[tuple[Tensor, Tensor]]] = {}

    def at_step0(self, rows: Tensor) -> Any:
        self.rows = rows

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            self.first[layer], self.own[layer] = (k, v), []
            asking = torch.arange(len(k)) if len(q) == len(k) else rows
            return softmax_attention(q, k, v, self._sees(asking))

        return attend

    def narrow(self, keep: Tensor) -> None:
        self.rows = self.rows[keep]
        self.own = {i: [(k[keep], v[keep]) for k, v in pairs] for i, pairs in self.own.items()}

    def at_later_step(self) -> Any:
        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            self.own[layer].append((k, v))
            itself = torch.eye(len(q), dtype=torch.bool)
            pairs = [self.first[layer], *self.own[layer]]
            seen = torch.cat([self._sees(self.rows), *[itself for _ in self.own[layer]]], dim=1)
            return softmax_attention(
                q, torch.cat([k for k, _ in pairs]), torch.cat([v for _, v in pairs]), seen
            )

        return attend

    def _sees(self, rows: Tensor) -> Tensor:
        same = self.document[rows][:, None] == self.document
        return same & (torch.arange(len(self.document)) <= rows[:, None])
