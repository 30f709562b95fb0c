"""Golden figures of the reference code, and batches made from their stored inputs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from eagle_train.heads.config import HeadConfig
from eagle_train.heads.disk import Head, build_head
from eagle_train.io.tensors import load_tensors
from eagle_train.shards.batches import PackedBatch
from eagle_train.shards.frozen_target import FrozenTarget

FOLDER = Path(__file__).parents[1] / "golden" / "A"


def load(name: str) -> tuple[dict[str, Tensor], dict[str, Any]]:
    tensors, _ = load_tensors(FOLDER / f"{name}.safetensors")
    return tensors, json.loads((FOLDER / f"{name}.json").read_text())


def head_of(tensors: dict[str, Tensor], record: dict[str, Any], **settings: Any) -> Head:
    """Build the head that the stored official weights describe."""
    config = dict(record["config"])
    for name in ("pad_token_id", "tie_word_embeddings", "num_hidden_layers"):
        config.pop(name)
    config = HeadConfig(
        **{"draft_vocab_size": config["vocab_size"], **config, **settings},
        head_dim=config["hidden_size"] // config["num_attention_heads"],
        rope_parameters={"rope_type": "default", "rope_theta": float(record["rope_theta"])},
    )
    weights = {name.removeprefix("weight."): x for name, x in tensors.items() if name.startswith("weight.")}
    draft_ids = None
    if "d2t" in weights:
        offsets = weights.pop("d2t")
        weights.pop("t2d")
        draft_ids = offsets + torch.arange(len(offsets))
    head = build_head(config, draft_ids)
    faults = head.load_state_dict(weights, strict=False)
    assert not faults.unexpected_keys
    assert set(faults.missing_keys) <= {"draft_ids", "in_draft"}
    return head


def frozen_of(tensors: dict[str, Tensor]) -> FrozenTarget:
    return FrozenTarget(tensors["embed_tokens.weight"], tensors["input.target_lm_head.weight"])


def packed(ids: list[Tensor], features: list[Tensor], last: list[Tensor], frozen: FrozenTarget, mask: Tensor):
    """Pack documents so that every position is a label and `mask` [S, N] says what counts at each step.

    mask[i, t] counts row t at step i. Returns the batch and `counted` [S, C].
    """
    lengths = torch.tensor([len(x) for x in ids])
    starts = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    rows = mask.any(0).nonzero().flatten()
    steps = torch.arange(1, len(mask) + 1)[:, None]
    label_last = torch.cat(last)
    logits = frozen.logits(label_last)
    flat = torch.cat(ids)
    batch = PackedBatch(
        input_ids=flat,
        next_ids=torch.cat([flat[1:], torch.zeros(1, dtype=torch.int64)]),
        feature=torch.cat(features),
        position=torch.cat([torch.arange(len(x)) for x in ids]),
        row_starts=starts,
        rows=rows,
        room=(mask * steps).amax(0)[rows],
        label0=rows + 1,
        label_last=label_last,
        label_argmax=logits.argmax(-1),
    )
    return batch, mask[:, rows].bool()
