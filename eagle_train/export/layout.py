"""What each engine loads: tensors and shapes, config.json, and what it cannot load.

The tables are written from the engines' loaders, not from this project's modules: vLLM says nothing about
missing tensors and SGLang nothing about unexpected ones either, so a file that differs from the table
serves at an acceptance length of 1 without a word.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from eagle_train.errors import UserError, nearest
from eagle_train.heads.config import HeadConfig
from eagle_train.heads.disk import Head, norm_twins
from eagle_train.heads.eagle1 import Eagle1Head

ENGINES = ("vllm", "sglang", "speculators", "eagle")
GUESSES = 3  # per round, unless told otherwise: it suits most heads when many requests share the machine
_MAPS = {"d2t": torch.int64, "t2d": torch.bool}
SWITCHES = ("fc_norm", "norm_output", "norm_before_fc", "norm_before_residual")
_NOT_THE_LAYERS = {
    "architectures",
    "draft_vocab_size",
    "eagle_aux_hidden_state_layer_ids",
    "eagle_config",
    "eagle_train",
    "target_hidden_size",
    "torch_dtype",
    *SWITCHES,
}


def check_engine(engine: str) -> str:
    """Return `engine`, or raise UserError naming the known ones."""
    if engine not in ENGINES:
        raise UserError(f"--engine {engine}: wanted one of {', '.join(ENGINES)}{nearest(engine, ENGINES)}")
    return engine


def as_served(head: Head, engine: str) -> Head:
    """Return the head with the tensors that `engine` wants; the same object where none differ.

    SGLang's EAGLE-1 fc has a bias that stays random unless stored, vLLM's has none: zeros are added or
    taken away, which changes no output.
    """
    wants_bias = engine == "sglang"
    if head.config.kind != "eagle1" or engine == "eagle" or head.config.fc_bias == wants_bias:
        return head
    served = copy.deepcopy(head)
    assert isinstance(served, Eagle1Head)
    weight = served.fc.weight
    bias = torch.nn.Parameter(weight.new_zeros(weight.shape[0])) if wants_bias else None
    served.fc.register_parameter("bias", bias)
    served.config = replace(head.config, fc_bias=wants_bias)
    return served


def engine_config(config: HeadConfig, engine: str) -> dict[str, Any]:
    """Return config.json for `engine`. EAGLE-3's is one and the same for vLLM and SGLang.

    EAGLE-1 in vLLM goes by the plain Llama name; vLLM puts its own prefix before it. EAGLE's repository
    takes an absent ``bias`` for true.
    """
    if config.kind == "medusa":
        return _medusa_config(config)
    if engine == "speculators":
        return _speculators_config(config)
    value = config.to_json()
    if config.kind == "eagle1" and engine == "vllm":
        value["architectures"] = ["LlamaForCausalLM"]
    if engine == "eagle":
        value["bias"] = config.fc_bias
    return value


def _medusa_config(config: HeadConfig) -> dict[str, Any]:
    """Return vLLM's Medusa config. No other key may hold ``num``: its reader renames those at sight."""
    return {
        "architectures": ["MedusaModel"],
        "model_type": "medusa",
        "hidden_size": config.hidden_size,
        "vocab_size": config.vocab_size,
        "truncated_vocab_size": config.vocab_size,
        "num_heads": config.medusa_heads,
        "num_hidden_layers": 1,
        "medusa_fc_bias": True,
        "torch_dtype": config.dtype,
        "dtype": config.dtype,
    }


def _speculators_config(config: HeadConfig) -> dict[str, Any]:
    """Return the config of the speculators library: the layer's settings apart, every switch written out.

    ``norm_before_residual`` is read as true by some and as false by others where it is absent. Of the layers'
    settings vLLM takes how many captured layers there are, without which it takes three.
    """
    value = config.to_json()
    found: dict[str, Any] = {
        "architectures": ["Eagle3DraftModel"],
        "speculators_model_type": "eagle3",
        "draft_vocab_size": config.draft_vocab_size,
        **{name: getattr(config, name) for name in SWITCHES},
        "eagle_aux_hidden_state_layer_ids": list(config.feature_layers),
        "embed_requires_grad": False,
        "tie_word_embeddings": False,
        "dtype": config.dtype,
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [
                {
                    "proposal_type": "greedy",
                    "speculative_tokens": GUESSES,
                    "verifier_accept_k": 1,
                    "accept_tolerance": 0.0,
                }
            ],
            "verifier": {"name_or_path": config.target, "architectures": []},
        },
        "transformer_layer_config": {key: value[key] for key in value if key not in _NOT_THE_LAYERS},
    }
    if config.qk_norm:  # which Qwen3's layers have
        found["transformer_layer_config"]["model_type"] = "qwen3"
    if "target_hidden_size" in value:
        found["target_hidden_size"] = value["target_hidden_size"]
    return found


def engine_tensors(tensors: Mapping[str, Tensor], config: HeadConfig, engine: str) -> dict[str, Tensor]:
    """Return a head's tensors under the engine's names.

    speculators numbers the first layer, and knows no second name of a further one's input norm; vLLM's Medusa
    blocks could have several layers.
    """
    twins = set(norm_twins(config)) if engine == "speculators" else set()
    return {_engine_name(name, engine): tensor for name, tensor in tensors.items() if name not in twins}


def _engine_name(name: str, engine: str) -> str:
    if engine == "speculators":
        return name.replace("midlayer.", "layers.0.")
    return re.sub(r"^(blocks\.\d+)\.", r"\1.layers.0.", name)


def wanted_tensors(config: HeadConfig, engine: str) -> dict[str, tuple[int, ...]]:
    """Return name and shape of every tensor that `engine` loads for such a head."""
    hidden = config.hidden_size
    if config.kind == "medusa":
        return _medusa_tensors(config, engine)
    if config.kind == "eagle1":
        wanted: dict[str, tuple[int, ...]] = {"fc.weight": (hidden, 2 * hidden)}
        if engine == "sglang" or (engine == "eagle" and config.fc_bias):
            wanted["fc.bias"] = (hidden,)
        for i in range(config.num_hidden_layers):
            wanted |= _layer(config, f"layers.{i}", width=hidden)
            if i:
                wanted[f"layers.{i}.input_layernorm.weight"] = (hidden,)
        return wanted
    width = config.target_hidden_size or hidden
    wanted = {
        "fc.weight": (hidden, config.num_features * width),
        "norm.weight": (hidden,),
        "lm_head.weight": (config.draft_vocab_size, hidden),
        "midlayer.input_layernorm.weight": (hidden,),
        "midlayer.hidden_norm.weight": (hidden,),
        **_layer(config, "midlayer", width=2 * hidden),
    }
    if config.norm_before_fc:
        wanted["input_norm.weight"] = (config.feature_width,)
    norms = ("input_layernorm",) if engine == "speculators" else ("input_layernorm", "hidden_norm")
    for i in range(1, config.num_hidden_layers):
        wanted |= _layer(config, f"layers.{i}", width=hidden)
        wanted |= {f"layers.{i}.{norm}.weight": (hidden,) for norm in norms}
    if config.fc_norm:
        wanted |= {f"fc_norm.{i}.weight": (width,) for i in range(config.num_features)}
    if config.reduced_vocabulary:
        wanted |= {"d2t": (config.draft_vocab_size,), "t2d": (config.vocab_size,)}
    return {_engine_name(name, engine): shape for name, shape in wanted.items()}


def _medusa_tensors(config: HeadConfig, engine: str) -> dict[str, tuple[int, ...]]:
    hidden = config.hidden_size
    wanted: dict[str, tuple[int, ...]] = {}
    for i in range(config.medusa_heads):
        wanted[f"blocks.{i}.weight"] = (hidden, hidden)
        wanted[f"blocks.{i}.bias"] = (hidden,)
        wanted[f"lm_heads.{i}.weight"] = (config.draft_vocab_size, hidden)
    return {_engine_name(name, engine): shape for name, shape in wanted.items()}


def tensor_faults(
    stored: Mapping[str, Tensor], config: HeadConfig, engine: str, dtype: torch.dtype
) -> list[str]:
    """Return what is missing, unexpected, misshapen, of another dtype or not finite, each by name."""
    wanted = wanted_tensors(config, engine)
    faults = [f"missing {name}" for name in wanted if name not in stored]
    faults += [f"unexpected {name}" for name in stored if name not in wanted]
    for name, tensor in stored.items():
        if name not in wanted:
            continue
        if tuple(tensor.shape) != wanted[name]:
            faults.append(f"{name} is {list(tensor.shape)}, wanted {list(wanted[name])}")
        if tensor.dtype != _MAPS.get(name, dtype):
            faults.append(f"{name} is {_short(tensor.dtype)}, wanted {_short(_MAPS.get(name, dtype))}")
        elif tensor.is_floating_point() and not bool(tensor.isfinite().all()):
            faults.append(
                f"{name} holds values that are not finite (as trained, or too large for {_short(dtype)})"
            )
    return faults


def _layer(config: HeadConfig, prefix: str, width: int) -> dict[str, tuple[int, ...]]:
    """One decoder layer whose q, k and v read `width` wide inputs; its input norm is not listed."""
    hidden, inner = config.hidden_size, config.intermediate_size
    queries = config.num_attention_heads * config.head_dim
    keys = config.num_key_value_heads * config.head_dim
    rows = {"q": queries, "k": keys, "v": keys, "o": hidden}
    wanted: dict[str, tuple[int, ...]] = {
        f"{prefix}.self_attn.q_proj.weight": (queries, width),
        f"{prefix}.self_attn.k_proj.weight": (keys, width),
        f"{prefix}.self_attn.v_proj.weight": (keys, width),
        f"{prefix}.self_attn.o_proj.weight": (hidden, queries),
        f"{prefix}.mlp.gate_proj.weight": (inner, hidden),
        f"{prefix}.mlp.up_proj.weight": (inner, hidden),
        f"{prefix}.mlp.down_proj.weight": (hidden, inner),
        f"{prefix}.post_attention_layernorm.weight": (hidden,),
    }
    if config.attention_bias:
        wanted |= {f"{prefix}.self_attn.{one}_proj.bias": (size,) for one, size in rows.items()}
    if config.qk_norm:
        wanted |= {f"{prefix}.self_attn.{one}_norm.weight": (config.head_dim,) for one in ("q", "k")}
    return wanted


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
