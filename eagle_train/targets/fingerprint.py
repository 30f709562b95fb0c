"""A cheap fingerprint that tells one set of target weights from another."""

from __future__ import annotations

import hashlib
import json
from typing import TYPE_CHECKING

import torch

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


def weights_fingerprint(model: PreTrainedModel, config: PretrainedConfig) -> str:
    """Return 16 hex digits over every parameter's name, shape and some of its values.

    Values are rounded to bf16 first, so the same checkpoint in fp32 and in bf16 agrees. Every tensor is
    sampled, so a fine-tune of any layer shows. Independent of how the checkpoint is cut into files.
    """
    digest = hashlib.sha256()
    for name, parameter in sorted(model.named_parameters()):
        digest.update(f"{name}{list(parameter.shape)}".encode())
        if parameter.device.type == "meta":  # offloaded to disk: its shape has to do
            continue
        flat = parameter.detach().reshape(-1)
        stride = max(1, flat.numel() // _SAMPLES)
        values = flat[::stride][:_SAMPLES].to(torch.bfloat16).float().cpu().tolist()
        digest.update(json.dumps(values).encode())
    settings = {name: getattr(config, name, None) for name in _SETTINGS}
    digest.update(json.dumps(settings, sort_keys=True, default=str).encode())
    return digest.hexdigest()[:16]
