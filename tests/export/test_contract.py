"""An export holds exactly what the engines' loaders take: every key, shape and config field by value."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

from eagle_train.export.export import export
from eagle_train.io.tensors import load_tensors

_LAYER = {  # 4 heads and 2 key-value heads of 16; {} is the width that q, k and v read
    "self_attn.q_proj.weight": (64, None),
    "self_attn.k_proj.weight": (32, None),
    "self_attn.v_proj.weight": (32, None),
    "self_attn.o_proj.weight": (32, 64),
    "mlp.gate_proj.weight": (48, 32),
    "mlp.up_proj.weight": (48, 32),
    "mlp.down_proj.weight": (32, 48),
    "post_attention_layernorm.weight": (32,),
}


def _layer(prefix: str, width: int) -> dict[str, tuple[int, ...]]:
    return {f"{prefix}.{name}": tuple(n or width for n in shape) for name, shape in _LAYER.items()}


_EAGLE3 = {
    "fc.weight": (32, 96),
    "norm.weight": (32,),
    "lm_head.weight": (96, 32),
    "midlayer.input_layernorm.weight": (32,),
    "midlayer.hidden_norm.weight": (32,),
    **_layer("midlayer", 64),
}
_REDUCED = {**_EAGLE3, "lm_head.weight": (40, 32), "d2t": (40,), "t2d": (96,)}
_NORMED = {**_EAGLE3, **{f"fc_norm.{i}.weight": (32,) for i in range(3)}}
_SECOND = {**_layer("layers.1", 32), "layers.1.input_layernorm.weight": (32,)}
_EAGLE1 = {"fc.weight": (32, 64), **_layer("layers.0", 32)}
_SIZES = {
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 96,
    "draft_vocab_size": 96,
    "rms_norm_eps": 3e-5,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "max_position_embeddings": 512,
    "rope_theta": 25000.0,
    "rope_scaling": None,
    "rope_parameters": {"rope_type": "default", "rope_theta": 25000.0},
    "torch_dtype": "bfloat16",
    "dtype": "bfloat16",
}
_IDS = {
    "architectures": ["LlamaForCausalLMEagle3"],
    "eagle_aux_hidden_state_layer_ids": [2, 4, 5],
    "eagle_config": {"use_aux_hidden_state": True, "eagle_aux_hidden_state_layer_ids": [1, 3, 4]},
    "num_aux_hidden_states": 3,
    "fc_norm": False,
    "norm_output": False,
}
_LLAMA3 = {
    "rope_theta": 500000.0,
    "rope_scaling": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 128,
    },
    "rope_parameters": {
        "rope_type": "llama3",
        "rope_theta": 500000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 128,
    },
}
_EAGLE1_VLLM = {"architectures": ["LlamaForCausalLM"]}
_EAGLE1_SGLANG = {"architectures": ["LlamaForCausalLMEagle"]}
_MEDUSA = {
    "architectures": ["MedusaModel"],
    "model_type": "medusa",
    "hidden_size": 32,
    "vocab_size": 96,
    "truncated_vocab_size": 96,
    "num_heads": 2,
    "num_hidden_layers": 1,
    "medusa_fc_bias": True,
    "torch_dtype": "bfloat16",
    "dtype": "bfloat16",
}
_CASES: dict[str, tuple[str, str, dict[str, Any], dict[str, tuple[int, ...]], dict[str, Any]]] = {
    "eagle3": ("eagle3", "vllm", {}, _EAGLE3, _IDS),
    "eagle3 for sglang": ("eagle3", "sglang", {}, _EAGLE3, _IDS),
    "reduced": ("eagle3", "vllm", {"draft_vocab_size": 40}, _REDUCED, {**_IDS, "draft_vocab_size": 40}),
    "llama3 rope": ("eagle3", "sglang", {"llama3": True}, _EAGLE3, {**_IDS, **_LLAMA3}),
    "3.1": (
        "eagle3",
        "vllm",
        {"fc_norm": True, "norm_output": True},
        _NORMED,
        {**_IDS, "fc_norm": True, "norm_output": True},
    ),
    "other width": (
        "eagle3",
        "vllm",
        {"target_hidden_size": 24},
        {**_EAGLE3, "fc.weight": (32, 72)},
        {**_IDS, "target_hidden_size": 24},
    ),
    "same width": ("eagle3", "vllm", {"target_hidden_size": 32}, _EAGLE3, _IDS),
    "other norms, window": (
        "eagle3",
        "vllm",
        {"norm_before_fc": True, "norm_before_residual": True, "sliding_window": 9},
        {**_EAGLE3, "input_norm.weight": (96,)},
        {
            **_IDS,
            "norm_before_fc": True,
            "norm_before_residual": True,
            "sliding_window": 9,
            "layer_types": ["sliding_attention"],
        },
    ),
    "attention biases": (
        "eagle3",
        "vllm",
        {"attention_bias": True},
        {
            **_EAGLE3,
            **{
                f"midlayer.self_attn.{one}_proj.bias": (size,)
                for one, size in (("q", 64), ("k", 32), ("v", 32), ("o", 32))
            },
        },
        {**_IDS, "attention_bias": True},
    ),
    "eagle3, two layers": (
        "eagle3",
        "vllm",
        {"num_hidden_layers": 2},
        {**_EAGLE3, **_SECOND, "layers.1.hidden_norm.weight": (32,)},
        {**_IDS, "num_hidden_layers": 2},
    ),
    "eagle1 for vllm": ("eagle1", "vllm", {}, _EAGLE1, _EAGLE1_VLLM),
    "eagle1 for sglang": ("eagle1", "sglang", {}, {**_EAGLE1, "fc.bias": (32,)}, _EAGLE1_SGLANG),
    "eagle1, llama3 rope": ("eagle1", "vllm", {"llama3": True}, _EAGLE1, {**_EAGLE1_VLLM, **_LLAMA3}),
    "medusa": (
        "medusa",
        "vllm",
        {"medusa_heads": 2},
        {
            **{f"blocks.{i}.layers.0.weight": (32, 32) for i in range(2)},
            **{f"blocks.{i}.layers.0.bias": (32,) for i in range(2)},
            **{f"lm_heads.{i}.weight": (96, 32) for i in range(2)},
        },
        {},
    ),
    "eagle1, two layers": (
        "eagle1",
        "vllm",
        {"num_hidden_layers": 2},
        {**_EAGLE1, **_SECOND},
        {**_EAGLE1_VLLM, "num_hidden_layers": 2},
    ),
}


@pytest.mark.parametrize("case", _CASES)
def test_files_hold_exactly_what_the_engine_loads(case, head_dir, tmp_path):
    kind, engine, fields, tensors, config = _CASES[case]
    out = tmp_path / "out"
    export(head_dir(kind, **fields), out, engine=engine, dtype="bf16")
    stored, metadata = load_tensors(out / "model.safetensors")
    assert {name: tuple(tensor.shape) for name, tensor in stored.items()} == tensors
    kinds = {"d2t": torch.int64, "t2d": torch.bool}
    assert all(tensor.dtype == kinds.get(name, torch.bfloat16) for name, tensor in stored.items())
    assert metadata == {"format": "pt"}
    written = json.loads((out / "config.json").read_text())
    if kind == "medusa":
        assert written == _MEDUSA
    else:
        own = written.pop("eagle_train")
        assert own["kind"] == kind
        extra = {"attention_bias": False, "mlp_bias": False}
        assert written == {**_SIZES, **extra, **config}
    assert sorted(entry.name for entry in out.iterdir()) == [
        "README.md",
        "check",
        "config.json",
        "model.safetensors",
        "provenance.json",
    ]


def test_the_speculators_layout_numbers_its_layers_and_writes_every_switch(head_dir, tmp_path):
    source = head_dir("eagle3", draft_vocab_size=40, fc_norm=True, llama3=True, num_hidden_layers=2)
    export(source, tmp_path / "out", engine="speculators", dtype="bf16")
    stored, _ = load_tensors(tmp_path / "out" / "model.safetensors")
    wanted = {**_REDUCED, **_SECOND, **{f"fc_norm.{i}.weight": (32,) for i in range(3)}}
    assert {name: tuple(tensor.shape) for name, tensor in stored.items()} == {
        name.replace("midlayer.", "layers.0."): shape for name, shape in wanted.items()
    }
    layer = {**_SIZES, "attention_bias": False, "mlp_bias": False, **_LLAMA3, "num_hidden_layers": 2}
    layer["num_aux_hidden_states"] = 3
    for name in ("draft_vocab_size", "torch_dtype"):
        del layer[name]
    assert json.loads((tmp_path / "out" / "config.json").read_text()) == {
        "architectures": ["Eagle3DraftModel"],
        "speculators_model_type": "eagle3",
        "draft_vocab_size": 40,
        "fc_norm": True,
        "norm_output": False,
        "norm_before_fc": False,
        "norm_before_residual": False,
        "eagle_aux_hidden_state_layer_ids": [2, 4, 5],
        "embed_requires_grad": False,
        "tie_word_embeddings": False,
        "dtype": "bfloat16",
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [
                {
                    "proposal_type": "greedy",
                    "speculative_tokens": 3,
                    "verifier_accept_k": 1,
                    "accept_tolerance": 0.0,
                }
            ],
            "verifier": {"name_or_path": "org/target", "architectures": []},
        },
        "transformer_layer_config": layer,
    }


def test_norms_on_queries_and_keys_go_to_vllm_as_a_layer_of_qwen3(head_dir, tmp_path):
    export(head_dir("eagle3", qk_norm=True), tmp_path / "out", engine="speculators", dtype="keep")
    stored, _ = load_tensors(tmp_path / "out" / "model.safetensors")
    norms = {f"layers.0.self_attn.{one}_norm.weight": (16,) for one in "qk"}
    assert {name: tuple(tensor.shape) for name, tensor in stored.items() if "_norm." in name} == {
        **norms,
        "layers.0.hidden_norm.weight": (32,),
    }
    written = json.loads((tmp_path / "out" / "config.json").read_text())
    assert written["transformer_layer_config"]["model_type"] == "qwen3"


@pytest.mark.parametrize("bias", [False, True])
def test_eagles_repository_is_told_about_the_bias_that_it_takes_for_granted(bias, head_dir, tmp_path):
    export(head_dir("eagle1", head_dim=8, fc_bias=bias), tmp_path / "out", engine="eagle", dtype="keep")
    stored, _ = load_tensors(tmp_path / "out" / "model.safetensors")
    assert ("fc.bias" in stored) == bias
    assert json.loads((tmp_path / "out" / "config.json").read_text())["bias"] is bias


def test_vocabulary_maps_hold_offsets_and_membership(head_dir, tmp_path):
    export(head_dir("eagle3", draft_vocab_size=40), tmp_path / "out", engine="vllm")
    stored, _ = load_tensors(tmp_path / "out" / "model.safetensors")
    assert stored["d2t"].tolist() == list(range(40))  # draft id i means target id 2i
    assert stored["t2d"].nonzero().flatten().tolist() == list(range(0, 80, 2))
