"""A cheap fingerprint that tells one set of target weights from another."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from eagle_train.targets.packed import dense

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

_SAMPLES = 32  # elements looked at in each tensor
_SETTINGS = (
    "num_attention_heads",
    "num_key_value_heads",
    "rms_norm_eps",
    "layer_norm_eps",
    "hidden_act",
    "rope_parameters",
    "sliding_window",
    "final_logit_softcapping",
    "logit_scale",
    "logits_scaling",
)  # settings that change the features while the weights stay the same
_OF_SOME = (
    "attention_multiplier",
    "attn_logit_softcapping",
    "clip_qkv",
    "embedding_multiplier",
    "layer_types",
    "lm_head_multiplier",
    "no_rope_layers",
    "query_pre_attn_scalar",
    "residual_multiplier",
)  # the same of single families; they count where they are set


def weights_fingerprint(
    model: PreTrainedModel, config: PretrainedConfig, whole: Callable[[str, Tensor], Tensor]
) -> str:
    """Return 16 hex digits over every parameter's name, shape and some of its values.

    Values are rounded to bf16 first, so the same checkpoint in fp32 and in bf16 agrees. Every tensor is
    sampled, so a fine-tune of any layer shows. Independent of how the checkpoint is cut into files.
    Quantised weights count as what they stand for where their kind says so, else as they are packed.
    `whole` puts a named tensor together where this process holds but a part.
    """
    digest = hashlib.sha256()
    quantised = getattr(config, "quantization_config", None) is not None
    tensors = model.state_dict() if quantised else dict(model.named_parameters())
    tensors = {name: value for name, value in tensors.items() if isinstance(value, torch.Tensor)}
    for name, part in sorted(tensors.items()):
        tensor = whole(name, part)
        digest.update(f"{name}{list(tensor.shape)}".encode())
        if tensor.device.type == "meta":  # offloaded to disk: its shape has to do
            continue
        flat = dense(tensor).reshape(-1)
        stride = max(1, flat.numel() // _SAMPLES)
        values = flat[::stride][:_SAMPLES].to(torch.bfloat16).float().cpu().tolist()
        digest.update(json.dumps(values).encode())
    settings = {name: getattr(config, name, None) for name in _SETTINGS}
    settings |= {name: value for name in _OF_SOME if (value := getattr(config, name, None)) is not None}
    digest.update(json.dumps(settings, sort_keys=True, default=str).encode())
    return digest.hexdigest()[:16]
