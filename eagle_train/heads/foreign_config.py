"""config.json of heads made elsewhere, resolved into one HeadConfig; what is open is asked, not guessed.

The same switch lies at the top level, in ``eagle_config`` or in ``transformer_layer_config``, and what is
absent means different things to different readers.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from eagle_train.errors import UserError
from eagle_train.heads.config import HeadConfig
from eagle_train.heads.config_fields import check_one_rope, checked
from eagle_train.heads.foreign_layers import hs_ids
from eagle_train.heads.foreign_tensors import ForeignTensors
from eagle_train.heads.rope_settings import rope_of

_OF_EAGLE3 = ("use_aux_hidden_state", "use_last_layernorm", "use_input_layernorm_in_first_layer")
_MODELOPT = (*_OF_EAGLE3[1:], "use_mtp_layernorm", "next_layer_regular", "parallel_draft_step")
_MUST_BE = {  # what a head here computes, whatever others can
    "use_mtp_layernorm": False,
    "next_layer_regular": True,
    "layernorms": False,
    "mlp_bias": False,
    "parallel_draft_step": 1,
    "logit_scale": 1.0,
    "partial_rotary_factor": 1.0,
}
_PLAIN_BASE = 10000.0  # what every reader takes where a config names none


@dataclass(frozen=True)
class Told:
    """What the user says about a head where its files leave it open; None leaves it to the files."""

    layer_ids: tuple[int, ...] | None = None  # hs ids
    rope_theta: float | None = None  # plain RoPE of this base, whatever config.json says
    norm_before_residual: bool | None = None
    sliding_window: int | None = None  # 0 for none

    def __post_init__(self) -> None:
        if self.rope_theta is not None and not 0 < self.rope_theta < math.inf:
            raise UserError(f"--rope-theta {self.rope_theta}: wanted a positive number, such as 10000")


@dataclass
class Resolved:
    """A foreign head's config, the name of its layout, and what a user should know about the reading."""

    config: HeadConfig
    layout: str
    notes: list[str] = field(default_factory=list)


def resolve(
    value: Mapping[str, Any], tensors: ForeignTensors, told: Told, depth: int | None, where: str
) -> Resolved:
    """Return the config behind a foreign config.json. `depth` is n of the target, None where not known.

    Raises UserError for what a head here cannot compute, for contradictions, and for what stays open, with
    the option that answers it.
    """
    value = checked(value, where)
    reader = _Reader(value, where)
    if tensors.kind == "medusa":
        return _medusa(reader, tensors)
    kind, weights = tensors.kind, tensors.weights
    layout = _layout(reader, kind, tensors.numbered_first)
    of_kind = dict.fromkeys(_OF_EAGLE3, kind == "eagle3")
    for name, wanted in (_MUST_BE | of_kind).items():
        found = reader.get(name)
        if found is not None and found != wanted:
            raise UserError(f"{where}: {name} is {found!r}, eagle computes only {wanted!r}")
    notes: list[str] = []
    first = "midlayer" if kind == "eagle3" else "layers.0"
    heads, hidden = reader.need("num_attention_heads"), reader.need("hidden_size")
    head_dim = _head_dim(reader, weights, f"{first}.self_attn.q_proj.weight", heads, hidden)
    layers = reader.get("num_hidden_layers")
    if layers is not None and layers != tensors.num_layers:
        raise UserError(f"{where}: num_hidden_layers is {layers}, the weights hold {tensors.num_layers}")
    if reader.get("rms_norm_eps") is None:
        notes.append("rms_norm_eps is absent: 1e-06, as every reader takes it")
    values: dict[str, Any] = {
        "kind": kind,
        "hidden_size": hidden,
        "intermediate_size": reader.need("intermediate_size"),
        "num_attention_heads": heads,
        "num_key_value_heads": reader.get("num_key_value_heads") or heads,
        "head_dim": head_dim,
        "vocab_size": reader.need("vocab_size"),
        "max_position_embeddings": reader.get("max_position_embeddings") or 2048,
        "rope_parameters": _rope(reader, told, notes),
        "num_hidden_layers": tensors.num_layers,
        "rms_norm_eps": reader.get("rms_norm_eps") or 1e-6,
        "hidden_act": reader.get("hidden_act") or "silu",
        "attention_bias": f"{first}.self_attn.q_proj.bias" in weights,
        "fc_bias": "fc.bias" in weights,
        "qk_norm": f"{first}.self_attn.q_norm.weight" in weights,
        "sliding_window": _window(reader, told, tensors.num_layers),
        "target": _target(value),
    }
    if kind == "eagle3":
        values |= _eagle3(reader, tensors, told, depth, layout, notes)
    elif reader.get("bias") and not values["fc_bias"]:
        raise UserError(f"{where}: bias is true, but the weights lack fc.bias; was the file cut?")
    values.setdefault("draft_vocab_size", values["vocab_size"])
    return Resolved(HeadConfig(**values), layout, notes)


def _medusa(reader: _Reader, tensors: ForeignTensors) -> Resolved:
    """Sizes come from the weights: configs of Medusa heads name few. Layers and attention mean nothing."""
    output_maps = [value for name, value in tensors.weights.items() if name.startswith("lm_heads.")]
    if output_maps[0].ndim != 2 or not output_maps[0].numel():
        raise UserError(f"{reader.where}: lm_heads are {list(output_maps[0].shape)}, wanted matrices [V, H]")
    vocabulary, hidden = output_maps[0].shape
    said = reader.get("vocab_size")
    if reader.get("original_lm_head") or (said is not None and said != vocabulary):
        raise UserError(
            f"{reader.where}: Medusa heads over {vocabulary} of {said} tokens, or with the target's lm_head: "
            "eagle reads those with a whole lm_head each"
        )
    config = HeadConfig(
        kind="medusa",
        hidden_size=hidden,
        intermediate_size=hidden,
        num_attention_heads=1,
        num_key_value_heads=1,
        head_dim=hidden,
        vocab_size=vocabulary,
        draft_vocab_size=vocabulary,
        max_position_embeddings=reader.get("max_position_embeddings") or 2048,
        rope_parameters={"rope_type": "default", "rope_theta": _PLAIN_BASE},
        medusa_heads=len(output_maps),
    )
    return Resolved(config, "Medusa")


class _Reader:
    """Looks a key up at every level it may lie at; refuses levels that contradict each other."""

    def __init__(self, value: Mapping[str, Any], where: str) -> None:
        levels = (value.get("eagle_config"), value, value.get("transformer_layer_config"))
        self.where = where
        self.top = value
        self.nested: Mapping[str, Any] = levels[0] if isinstance(levels[0], Mapping) else {}
        self._levels = [level for level in levels if isinstance(level, Mapping)]

    def get(self, name: str) -> Any:
        """Return the value of `name`, None where it is absent or null."""
        found = [level[name] for level in self._levels if level.get(name) is not None]
        if any(other != found[0] for other in found[1:]):
            raise UserError(f"{self.where}: {name} is {found[0]!r} and {found[1]!r}; correct one of them")
        return found[0] if found else None

    def need(self, name: str) -> Any:
        """Return the value of `name`; UserError where there is none."""
        found = self.get(name)
        if found is None:
            raise UserError(f"{self.where}: lacks {name}; is this a draft head's config.json?")
        return found

    def inner(self) -> Mapping[str, Any]:
        """Return the level that holds the decoder layer's sizes and RoPE."""
        inner = self.top.get("transformer_layer_config")
        return inner if isinstance(inner, Mapping) else self.top


def _layout(reader: _Reader, kind: str, numbered_first: bool) -> str:
    """Name the layout; refuse a config that speaks of another kind than the weights."""
    speculators = reader.top.get("speculators_model_type")
    architectures = " ".join(reader.top.get("architectures") or ())
    says = "eagle3" if "Eagle3" in architectures else None
    if speculators is not None:
        says = {"eagle": "eagle1", "eagle3": "eagle3"}.get(speculators, speculators)
    if says is not None and says != kind:
        raise UserError(f"{reader.where}: says {says}, the weights are those of an {kind} head")
    if speculators is not None:
        return "speculators"
    if any(name in reader.nested for name in _MODELOPT):
        return "ModelOpt"
    if kind == "eagle3" and reader.nested and not numbered_first:
        return "SpecForge"
    return "EAGLE"


def _head_dim(reader: _Reader, weights: Mapping[str, Tensor], name: str, heads: int, hidden: int) -> int:
    said = reader.get("head_dim")
    if said is None and name in weights and weights[name].shape[0] % heads == 0:
        return int(weights[name].shape[0]) // heads
    return said or hidden // heads


def _rope(reader: _Reader, told: Told, notes: list[str]) -> dict[str, Any]:
    """Return RoPE settings; a note where the file's own may not be what the head was trained with."""
    if told.rope_theta is not None:
        return {"rope_type": "default", "rope_theta": told.rope_theta}
    inner = reader.inner()
    parameters = inner.get("rope_parameters") or {}
    bases = [
        place["rope_theta"]
        for place in (parameters, inner.get("rope_scaling") or {}, inner)
        if place.get("rope_theta") is not None
    ]
    if any(base != bases[0] for base in bases[1:]):
        raise UserError(
            f"{reader.where}: rope_theta is {bases[0]:g} and {bases[1]:g}; say which with --rope-theta"
        )
    if float(parameters.get("partial_rotary_factor") or 1.0) != 1.0:
        raise UserError(f"{reader.where}: partial_rotary_factor: eagle rotates whole heads only")
    check_one_rope(inner, reader.where, "correct one of them, or say --rope-theta for plain RoPE")
    rope = rope_of(inner)
    if not bases:
        notes.append(
            f"rope_theta is absent: {_PLAIN_BASE:g}, as every reader takes it; --rope-theta to differ"
        )
        rope["rope_theta"] = _PLAIN_BASE
    if bases and rope["rope_type"] != "default":
        notes.append(
            f"RoPE is {rope['rope_type']} with base {bases[0]:g}, as engines read it; some trainers computed "
            "plain RoPE of base 10000 under such a config: if few guesses stand, try --rope-theta 10000"
        )
    return rope


def _window(reader: _Reader, told: Told, num_layers: int) -> int | None:
    """Return the sliding window. Layers without ``layer_types`` are read differently by everyone."""
    if told.sliding_window is not None:
        return told.sliding_window or None
    width, kinds = reader.get("sliding_window"), reader.get("layer_types")
    if kinds is not None:
        used = set(kinds[:num_layers])
        if used == {"full_attention"}:
            return None
        if used == {"sliding_attention"} and width:
            return int(width)
        raise UserError(f"{reader.where}: layer_types {kinds} with sliding_window {width}: not computed here")
    if not width or reader.get("use_sliding_window") is False:
        return None
    raise UserError(
        f"{reader.where}: sliding_window {width} without layer_types, which some readers use and others "
        f"ignore; say --sliding-window {width}, or 0 for none"
    )


def _eagle3(
    reader: _Reader, tensors: ForeignTensors, told: Told, depth: int | None, layout: str, notes: list[str]
) -> dict[str, Any]:
    weights, where = tensors.weights, reader.where
    lm_head = weights.get("lm_head.weight")
    if lm_head is None:
        raise UserError(f"{where}: the weights lack lm_head.weight; an eagle3 head has its own")
    norms = {
        "fc_norm": bool(reader.get("fc_norm") or reader.get("use_aux_norm")),  # the latter is its older name
        "norm_before_fc": bool(reader.get("norm_before_fc")),
    }
    for (switch, on), name in zip(norms.items(), ("fc_norm.0.weight", "input_norm.weight"), strict=True):
        if on != (name in weights):
            raise UserError(f"{where}: {switch} is {on}, but the file {'lacks' if on else 'has'} {name}")
    width = reader.get("target_hidden_size")
    return {
        "draft_vocab_size": reader.get("draft_vocab_size") or int(lm_head.shape[0]),
        "feature_layers": _layers(reader, told, depth, notes),
        "target_hidden_size": None if width == reader.need("hidden_size") else width,
        **norms,
        "norm_output": bool(reader.get("norm_output")),
        "norm_before_residual": _norm_before_residual(reader, told, layout),
    }


def _layers(reader: _Reader, told: Told, depth: int | None, notes: list[str]) -> tuple[int, ...]:
    if told.layer_ids is not None:
        return told.layer_ids
    key = "eagle_aux_hidden_state_layer_ids"
    found = hs_ids(reader.top.get(key) or (), reader.nested.get(key) or (), depth, reader.where)
    if not found:
        notes.append("no layer ids: 2, n/2 and n-3 of the target's n layers, as every reader takes them")
    return found


def _norm_before_residual(reader: _Reader, told: Told, layout: str) -> bool:
    said = reader.get("norm_before_residual")
    if told.norm_before_residual is not None:
        return told.norm_before_residual
    if said is None and layout == "speculators":
        raise UserError(
            f"{reader.where}: norm_before_residual is absent, which vLLM reads as true and speculators as "
            "false; say --norm-before-residual or --no-norm-before-residual"
        )
    return bool(said)


def _target(value: Mapping[str, Any]) -> str:
    """Return the target's name where a speculators config has it."""
    verifier = (value.get("speculators_config") or {}).get("verifier") or {}
    return str(verifier.get("name_or_path") or "")
