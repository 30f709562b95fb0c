"""A target's config.json before transformers computes with it: numbers that no model has are named."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from eagle_train.errors import UserError
from eagle_train.io.text import read_json

_DEEPEST, _WIDEST = 4096, 2**24  # far above any model: beyond, bytes can no longer be counted
_SIZES = {
    "num_hidden_layers": _DEEPEST,
    "n_layer": _DEEPEST,
    "hidden_size": _WIDEST,
    "n_embd": _WIDEST,
    "intermediate_size": _WIDEST,
    "num_attention_heads": _WIDEST,
    "n_head": _WIDEST,
    "num_key_value_heads": _WIDEST,
    "head_dim": _WIDEST,
    "vocab_size": 2**31,
    "max_position_embeddings": 2**53,
}


def check_config_file(file: Path, name: str) -> None:
    """Raise UserError, beginning with `name`, for a config.json that is no JSON object or describes no model.

    Sizes must be above 0 and no larger than any model's, key-value heads must share the attention heads
    evenly, and theta, dtype and quantisation be of their kind. What a key may lack is left to transformers.
    """
    record = read_json(file, "fetch it again")
    text = record.get("text_config")
    for settings in (record, text if isinstance(text, dict) else {}):
        for key, most in _SIZES.items():
            value = settings.get(key)
            if type(value) is int and not 1 <= value <= most:
                raise _odd(name, key, value, f"a whole number from 1 to {most}")
        heads, shared = settings.get("num_attention_heads"), settings.get("num_key_value_heads")
        if type(heads) is int and type(shared) is int and heads % shared:
            raise _odd(name, "num_key_value_heads", shared, f"a divisor of num_attention_heads {heads}")
        _check_rope(settings, name)
        for key in ("dtype", "torch_dtype"):
            if isinstance(value := settings.get(key), str) and not _is_dtype(value):
                raise _odd(name, key, value, "a dtype of torch such as bfloat16")
        packing = settings.get("quantization_config")
        if packing is not None and not isinstance(packing, dict):
            raise _odd(name, "quantization_config", packing, "an object, or none")


def _check_rope(settings: Mapping[str, Any], name: str, where: str = "") -> None:
    """Check theta and factor, at the top, in the RoPE settings or in those of each kind of layer."""
    theta = settings.get("rope_theta")
    if isinstance(theta, int | float) and not 0 < theta < math.inf:
        raise _odd(name, f"{where}rope_theta", theta, "a number above 0")
    kind = settings.get("rope_type", settings.get("type"))
    if where and kind in ("linear", "dynamic", "llama3", "yarn") and settings.get("factor") is None:
        raise _odd(name, f"{where}factor", None, f"a number, which rope_type {kind} needs")
    for key, inner in settings.items():
        if isinstance(inner, dict) and (where or key in ("rope_parameters", "rope_scaling")):
            _check_rope(inner, name, f"{where}{key}.")


def _is_dtype(name: str) -> bool:
    import torch

    return isinstance(getattr(torch, name.removeprefix("torch."), None), torch.dtype)


def _odd(name: str, key: str, value: Any, wanted: str) -> UserError:
    return UserError(
        f"{name}: config.json: {key}: got {value!r}, wanted {wanted}; correct it, or fetch it again"
    )
