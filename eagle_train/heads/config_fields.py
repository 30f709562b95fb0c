"""What may stand in a head's config.json, of ours or another's: each field that is read, with its range."""

from __future__ import annotations

import reprlib
from collections.abc import Callable, Mapping
from typing import Any

from eagle_train.errors import UserError

Rule = tuple[Callable[[Any], bool], str]  # what holds of a value, and how that is said
LAYERS, SIZE = 1000, 1 << 24  # more of either is no draft head's


def _whole(low: int, high: int) -> Rule:
    def holds(value: Any) -> bool:
        return type(value) is int and low <= value <= high

    return holds, f"a whole number from {low} to {high}"


def _number(low: float, high: float) -> Rule:
    def holds(value: Any) -> bool:
        return type(value) in (int, float) and low <= value <= high

    return holds, f"a number from {low:g} to {high:g}"


def _is(kind: type, words: str) -> Rule:
    return lambda value: isinstance(value, kind), words


def _list_of(rule: Rule, words: str) -> Rule:
    return lambda value: isinstance(value, list) and all(map(rule[0], value)), words


_SIZE = _whole(1, SIZE)
_TEXT = _is(str, "text")
_SWITCH = _is(bool, "true or false")
_OBJECT = _is(dict, "an object")
_TEXTS = _list_of(_TEXT, "a list of texts")
_IDS = _list_of(_whole(0, LAYERS), "a list of layer numbers, 0 or more")
_POSITIVE = _number(1e-6, 1e12)
_POSITIONS = _whole(1, 2**31 - 1)
_HEAD_DIM: Rule = (
    lambda value: _whole(2, 1 << 16)[0](value) and value % 2 == 0,
    "an even number from 2 to 65536 (RoPE turns pairs)",
)

_SWITCHES = (
    "attention_bias",
    "bias",
    "mlp_bias",
    "fc_norm",
    "use_aux_norm",
    "norm_output",
    "norm_before_fc",
    "norm_before_residual",
    "use_sliding_window",
    "original_lm_head",
)
FIELDS: dict[str, Rule] = {
    "hidden_size": _SIZE,
    "intermediate_size": _SIZE,
    "target_hidden_size": _SIZE,
    "num_attention_heads": _SIZE,
    "num_key_value_heads": _SIZE,
    "num_hidden_layers": _whole(1, LAYERS),
    "head_dim": _HEAD_DIM,
    "vocab_size": _SIZE,
    "draft_vocab_size": _SIZE,
    "max_position_embeddings": _POSITIONS,
    "original_max_position_embeddings": _POSITIONS,
    "rms_norm_eps": _number(1e-30, 1),
    "rope_theta": _POSITIVE,
    "rope_scaling": _OBJECT,
    "rope_parameters": _OBJECT,
    "sliding_window": _whole(0, 2**31 - 1),
    "layer_types": _TEXTS,
    "hidden_act": _TEXT,
    "architectures": _TEXTS,
    "dtype": _TEXT,
    "torch_dtype": _TEXT,
    "speculators_model_type": _TEXT,
    "speculators_config": _OBJECT,
    "eagle_config": _OBJECT,
    "transformer_layer_config": _OBJECT,
    "eagle_train": _OBJECT,
    "eagle_aux_hidden_state_layer_ids": _IDS,
    **dict.fromkeys(_SWITCHES, _SWITCH),
}
_ROPE: dict[str, Rule] = {
    "rope_type": _TEXT,
    "type": _TEXT,
    "rope_theta": _POSITIVE,
    "original_max_position_embeddings": _POSITIONS,
    "short_factor": _list_of(_POSITIVE, "a list of positive numbers"),
    "long_factor": _list_of(_POSITIVE, "a list of positive numbers"),
    **dict.fromkeys(
        ("factor", "attention_factor", "low_freq_factor", "high_freq_factor", "partial_rotary_factor"),
        _POSITIVE,
    ),
    **dict.fromkeys(("beta_fast", "beta_slow", "mscale", "mscale_all_dim"), _number(0, 1e12)),
    "full_attention": _OBJECT,
}
_INNER: dict[str, dict[str, Rule]] = {  # objects whose own fields are read
    "eagle_config": FIELDS,
    "transformer_layer_config": FIELDS,
    "rope_scaling": _ROPE,
    "rope_parameters": _ROPE,
    "full_attention": _ROPE,
    "speculators_config": {"verifier": _OBJECT},
    "verifier": {"name_or_path": _TEXT},
    "eagle_train": {
        "kind": _TEXT,
        "feature_layers": _IDS,
        "target": _TEXT,
        "fc_bias": _SWITCH,
        "qk_norm": _SWITCH,
        "medusa_heads": _whole(0, LAYERS),
    },
}


def checked(
    value: Mapping[str, Any], where: str, rules: Mapping[str, Rule] = FIELDS, at: str = ""
) -> dict[str, Any]:
    """Return the object without its nulls, which mean absent. `at` is its place in the file, as ``a.b.``.

    Raises UserError naming the first field that is not what it must be; fields that no rule names are none
    of ours and may hold anything.
    """
    found = {name: entry for name, entry in value.items() if entry is not None}
    for name, entry in found.items():
        if name in rules and not rules[name][0](entry):
            raise UserError(f"{where}: {at}{name} is {reprlib.repr(entry)}, wanted {rules[name][1]}")
        if name in _INNER and isinstance(entry, dict):
            found[name] = checked(entry, where, _INNER[name], f"{at}{name}.")
    return found


def check_one_rope(config: Mapping[str, Any], where: str, otherwise: str) -> None:
    """Raise UserError where rope_parameters and the older rope_scaling ask for different rotations.

    `config` is one `checked`; `otherwise` ends the sentence with what to do.
    """
    new, old = config.get("rope_parameters"), config.get("rope_scaling")
    if not new or not old:
        return
    new = new.get("full_attention", new)
    kinds = [_rope_type(place) for place in (new, old)]
    if kinds[0] != kinds[1]:
        raise UserError(
            f"{where}: RoPE is {kinds[0]!r} in rope_parameters and {kinds[1]!r} in rope_scaling; {otherwise}"
        )
    for name in sorted(_ROPE.keys() & new.keys() & old.keys() - {"rope_type", "type"}):
        if new[name] != old[name]:
            raise UserError(
                f"{where}: {name} is {reprlib.repr(new[name])} in rope_parameters and "
                f"{reprlib.repr(old[name])} in rope_scaling; {otherwise}"
            )


def _rope_type(rope: Mapping[str, Any]) -> str:
    said = rope.get("rope_type") or rope.get("type") or "default"
    return "default" if said == "mrope" else str(said)  # text alone: its three sections agree
