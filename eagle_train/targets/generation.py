"""What a target's generation_config does to its logits, beside temperature, top-k and top-p."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

# What changes logits by the text, what only cuts the law of a sample, and what depends on more than the text
# (another forward, an encoder, the loop's own limits) or draws in another way.
BY_TEXT = (
    "sequence_bias",
    "repetition_penalty",
    "no_repeat_ngram_size",
    "bad_words_ids",
    "min_length",
    "min_new_tokens",
    "forced_bos_token_id",
    "exponential_decay_length_penalty",
    "suppress_tokens",
    "begin_suppress_tokens",
)
OF_THE_LAW = ("min_p", "typical_p", "epsilon_cutoff", "eta_cutoff")
REFUSED = (
    "guidance_scale",
    "encoder_repetition_penalty",
    "encoder_no_repeat_ngram_size",
    "forced_eos_token_id",
    "remove_invalid_values",
    "watermarking_config",
    "top_h",
    "renormalize_logits",
)
_OFF = {
    "repetition_penalty": 1.0,
    "typical_p": 1.0,
    "guidance_scale": 1.0,
    "encoder_repetition_penalty": 1.0,
}


def own_settings(generation_config: Any) -> dict[str, Any]:
    """Return those settings that do something, by name, as JSON has them.

    The config is an object, a record of one, or None.
    """
    is_record = isinstance(generation_config, Mapping)
    found = {}
    for key in (*BY_TEXT, *OF_THE_LAW, *REFUSED):
        value = generation_config.get(key) if is_record else getattr(generation_config, key, None)
        if value in (None, False, [], 0, _OFF.get(key)):
            continue
        if key == "sequence_bias" and isinstance(value, Mapping):
            value = [[list(tokens), bias] for tokens, bias in value.items()]
        found[key] = value.to_dict() if hasattr(value, "to_dict") else value
    return found
