"""Tiny heads on disk, as training leaves them: fp32, random but reproducible."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from eagle_train.heads.config import HeadConfig
from eagle_train.heads.disk import build_head, save_head

# head_dim is not hidden / heads, and the epsilon is none of the usual defaults
_TARGET: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 32,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_hidden_layers": 8,
    "intermediate_size": 48,
    "vocab_size": 96,
    "max_position_embeddings": 512,
    "rms_norm_eps": 3e-5,
    "rope_parameters": {"rope_type": "default", "rope_theta": 25000.0},
}
_LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 128,
}


@pytest.fixture
def head_dir(tmp_path: Path) -> Callable[..., Path]:
    """Make a head directory: ``head_dir("eagle3", llama3=True, draft_vocab_size=40)``."""

    def make(kind: str, *, llama3: bool = False, seed: int = 0, name: str = "head", **fields: Any) -> Path:
        target = {**_TARGET, "rope_parameters": dict(_LLAMA3)} if llama3 else _TARGET
        config = HeadConfig.for_target(target, kind, **{"target": "org/target", **fields})
        torch.manual_seed(seed)
        size = config.draft_vocab_size
        head = build_head(config, torch.arange(size) * 2 if config.reduced_vocabulary else None)
        with torch.no_grad():
            for weight in head.parameters():
                if weight.ndim == 1:  # norms start at one, where a forgotten one would not show
                    weight.uniform_(0.5, 1.5)
        save_head(head, tmp_path / name)
        return tmp_path / name

    return make
