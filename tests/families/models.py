"""Tiny random targets of many families, each with what makes the family different from Llama."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import torch

WINDOW = 12  # of every family that has one; prompts in these tests are longer
LAYERS = 8
SIZES: dict[str, Any] = {
    "vocab_size": 300,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "bos_token_id": None,
    "eos_token_id": 2,
    "pad_token_id": 2,
    "dtype": "float32",
}
_LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
_GEMMA = {"head_dim": 16, "query_pre_attn_scalar": 16, "sliding_window": WINDOW}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}

# family -> (class of its config, what it sets beside the sizes)
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama2": ("LlamaConfig", {"num_key_value_heads": 4, "tie_word_embeddings": False}),
    "llama3": ("LlamaConfig", {"rope_parameters": _LLAMA3, "tie_word_embeddings": True}),
    "mistral": ("MistralConfig", {"sliding_window": WINDOW}),
    "qwen2": ("Qwen2Config", {"tie_word_embeddings": True}),
    "qwen2-window": (
        "Qwen2Config",
        {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 4},
    ),
    "qwen3": ("Qwen3Config", {"head_dim": 16}),
    "gemma2": (
        "Gemma2Config",
        {**_GEMMA, "final_logit_softcapping": 1.5, "attn_logit_softcapping": 5.0},
    ),
    "gemma3": ("Gemma3TextConfig", {**_GEMMA, "sliding_window_pattern": 3}),
    "phi3": ("Phi3Config", {"sliding_window": WINDOW}),
    "phi3-long": (
        "Phi3Config",
        {
            "original_max_position_embeddings": 256,
            "rope_parameters": {
                "rope_type": "longrope",
                "rope_theta": 10000.0,
                "short_factor": [1.0, 1.1, 1.2, 1.3],
                "long_factor": [2.0, 4.0, 6.0, 8.0],
                "original_max_position_embeddings": 256,
            },
        },
    ),
    "mixtral": ("MixtralConfig", {"num_local_experts": 4, "sliding_window": WINDOW}),
    "qwen3-moe": ("Qwen3MoeConfig", {"head_dim": 16, **_EXPERTS}),
    "olmo": ("OlmoConfig", {"clip_qkv": 4.0}),
    "olmo2": ("Olmo2Config", {}),
    "olmo3": ("Olmo3Config", {"sliding_window": WINDOW}),
    "smollm3": ("SmolLM3Config", {"no_rope_layer_interval": 4}),
    "gpt-neox": ("GPTNeoXConfig", {"num_key_value_heads": 4}),
    "gpt2": ("GPT2Config", {}),
    "deepseek-distill-qwen": ("Qwen2Config", {"num_key_value_heads": 1, "tie_word_embeddings": False}),
    "deepseek-distill-llama": ("LlamaConfig", {"rope_parameters": _LLAMA3, "tie_word_embeddings": False}),
    "granite": (
        "GraniteConfig",
        {
            "logits_scaling": 3.0,
            "embedding_multiplier": 2.0,
            "residual_multiplier": 0.5,
            "attention_multiplier": 0.2,
        },
    ),
    "cohere": ("CohereConfig", {"logit_scale": 0.25, "use_qk_norm": True}),
    "cohere2": ("Cohere2Config", {"logit_scale": 0.25, "sliding_window": WINDOW}),
    "gpt-oss": (
        "GptOssConfig",
        {"head_dim": 16, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": WINDOW},
    ),
}


def family_config(family: str, **settings: Any) -> Any:
    """Return the family's config; `settings` go over its own."""
    import transformers

    name, own = FAMILIES[family]
    return getattr(transformers, name)(**{**SIZES, **own, **settings})


def longrope(switch: int) -> Any:
    """Return the config of a Phi-3 whose angles change past `switch` tokens."""
    rope = family_config("phi3-long").rope_parameters
    return family_config(
        "phi3-long",
        original_max_position_embeddings=switch,
        rope_parameters={**rope, "original_max_position_embeddings": switch},
    )


def random_model(config: Any, seed: int = 0) -> Any:
    """Return a model whose weights are large enough that texts vary, norms and biases included."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_config(config).eval()
    generator = torch.Generator().manual_seed(seed)
    # Gemma scales tied embeddings up: as large as others', a token would always be followed by itself
    spread = 0.05 if "gemma" in config.model_type else 0.3
    with torch.no_grad():
        for name, weight in model.named_parameters():
            noise = torch.randn(weight.shape, generator=generator)
            if weight.ndim == 1:  # norms start at one or, in Gemma, at zero; biases at zero, a few at random
                weight.copy_(weight.round() + 0.1 * noise)
            else:
                is_vocabulary = "embed" in name or "lm_head" in name
                weight.copy_((spread if is_vocabulary else 2 / weight.shape[-1] ** 0.5) * noise)
    return model


def save_target(folder: Path, config: Any, tokenizer_from: Path, quantisation: Any = None) -> Path:
    """Save a random model of `config`, quantised where asked, beside the tokenizer of another target."""
    model = random_model(config)
    if quantisation is not None:
        model.save_pretrained(folder / "whole")
        model = type(model).from_pretrained(folder / "whole", quantization_config=quantisation)
    model.save_pretrained(folder)
    for file in tokenizer_from.glob("*"):
        if "token" in file.name or file.name.startswith("chat_template"):
            shutil.copy(file, folder / file.name)
    return folder
