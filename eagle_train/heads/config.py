"""What a head is, as one frozen record, and its config.json in the layout that serving engines read."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from eagle_train.errors import UserError, nearest
from eagle_train.heads.rope_settings import rope_of

KINDS = ("eagle1", "eagle3", "medusa")
_ARCHITECTURES = {
    "eagle1": "LlamaForCausalLMEagle",
    "eagle3": "LlamaForCausalLMEagle3",
    "medusa": "MedusaModel",
}
# under the key below; no engine reads them
_OWN = ("kind", "feature_layers", "target", "fc_bias", "qk_norm", "medusa_heads")
_OWN_KEY = "eagle_train"
_TARGET_SIZES = ("hidden_size", "num_attention_heads", "num_hidden_layers")
_EAGLE3_ONLY = (
    "fc_norm",
    "norm_output",
    "norm_before_fc",
    "norm_before_residual",
    "feature_layers",
    "target_hidden_size",
)


@dataclass(frozen=True)
class HeadConfig:
    """Sizes and switches of a draft head.

    `feature_layers` are ids in the hs convention: hs[k] is the residual stream entering target layer
    k. An EAGLE-3 head read from a foreign directory may hold none; then `layers_for` gives what both
    engines take. The head's embedding is the target's, so `hidden_size` is the target's embedding
    width; `target_hidden_size` is the width of one captured layer where that differs.
    """

    kind: str
    hidden_size: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int
    draft_vocab_size: int
    max_position_embeddings: int
    rope_parameters: dict[str, Any] = field(hash=False)
    feature_layers: tuple[int, ...] = ()
    num_hidden_layers: int = 1
    target_hidden_size: int | None = None
    rms_norm_eps: float = 1e-6
    hidden_act: str = "silu"
    fc_norm: bool = False  # an RMSNorm on each captured layer before fc (EAGLE-3.1)
    norm_output: bool = False  # feed the normed output to the next step (EAGLE-3.1)
    norm_before_fc: bool = False  # one RMSNorm over all captured layers together before fc
    norm_before_residual: bool = False  # the first layer's residual is the normed feature
    sliding_window: int | None = None  # a row sees this many rows, itself included; null = all
    fc_bias: bool = False
    attention_bias: bool = False
    qk_norm: bool = False  # an RMSNorm on each query and key before its rotation (Qwen3)
    medusa_heads: int = 0  # tokens guessed ahead; layers and attention above mean nothing to them
    dtype: str = "float32"
    target: str = ""

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise UserError(f"head: kind '{self.kind}', wanted one of {', '.join(KINDS)}")
        if self.hidden_act != "silu":
            raise UserError(f"head: hidden_act '{self.hidden_act}'; serving engines compute only silu")
        if self.num_attention_heads % self.num_key_value_heads:
            raise UserError(
                f"head: {self.num_attention_heads} attention heads cannot share "
                f"{self.num_key_value_heads} key-value heads; wanted a divisor"
            )
        if self.hidden_size % self.num_attention_heads:  # which transformers' config demands
            raise UserError(
                f"head: hidden_size is {self.hidden_size}, wanted a multiple of the "
                f"{self.num_attention_heads} attention heads"
            )
        if not 1 <= self.draft_vocab_size <= self.vocab_size:
            raise UserError(
                f"head: draft_vocab_size {self.draft_vocab_size}, wanted 1 to the target's {self.vocab_size}"
            )
        if self.num_hidden_layers < 1:
            raise UserError(f"head: num_hidden_layers {self.num_hidden_layers}, wanted 1 or more")
        if self.sliding_window is not None and self.sliding_window < 1:
            raise UserError(f"head: sliding_window {self.sliding_window}, wanted 1 or more, or null")
        if (self.kind == "medusa") != (self.medusa_heads > 0):
            raise UserError(
                f"head: kind {self.kind} with {self.medusa_heads} medusa_heads; wanted medusa and 1 or more"
            )
        if self.kind != "eagle3":
            self._check_not_eagle3()
        elif self.feature_layers and list(self.feature_layers) != sorted(set(self.feature_layers)):
            raise UserError(f"head: feature_layers {self.feature_layers}, wanted distinct ids, low to high")
        if any(k < 0 for k in self.feature_layers):
            raise UserError(f"head: feature_layers {self.feature_layers}, wanted ids of 0 or more")

    def _check_not_eagle3(self) -> None:
        if self.kind == "eagle1" and self.draft_vocab_size != self.vocab_size:
            raise UserError(
                "head: an eagle1 head uses the target's lm_head; draft_vocab_size must be left out"
            )
        if names := [name for name in _EAGLE3_ONLY if getattr(self, name)]:
            raise UserError(f"head: {', '.join(names)}: only eagle3 heads have such a setting")

    @property
    def feature_width(self) -> int:
        """F, the width of one row of features: captured layers side by side, or H for eagle1."""
        if self.kind != "eagle3":
            return self.hidden_size
        return self.num_features * (self.target_hidden_size or self.hidden_size)

    @property
    def num_features(self) -> int:
        """Number of captured layers; three where a foreign eagle3 config names none."""
        return len(self.feature_layers) or (3 if self.kind == "eagle3" else 1)

    @property
    def reduced_vocabulary(self) -> bool:
        return self.draft_vocab_size < self.vocab_size

    def layers_for(self, num_target_layers: int) -> tuple[int, ...]:
        """Return the captured layers (hs ids) on a target of that depth. Raises UserError if impossible."""
        if self.kind != "eagle3":
            return ()
        layers = self.feature_layers or default_layers(num_target_layers)
        if max(layers) > num_target_layers:
            raise UserError(
                f"head: feature_layers {layers}, but the target has {num_target_layers} layers; "
                "is it the head's own target?"
            )
        return layers

    @classmethod
    def for_target(cls, target_config: Mapping[str, Any], kind: str, **overrides: Any) -> HeadConfig:
        """Return the head that fits a target, given the target's Hugging Face (text) config as a dict.

        RoPE, head_dim, key-value heads and the norm's epsilon come from the target; any field may be
        overridden. Raises UserError for an unknown override and where the target is too shallow for
        the default layers.
        """
        known = {entry.name for entry in dataclasses.fields(cls)}
        for name in overrides:
            if name not in known:
                raise UserError(f"head: unknown setting '{name}'{nearest(name, known)}")
        hidden, heads, depth = (_size(target_config, name) for name in _TARGET_SIZES)
        values: dict[str, Any] = {
            "kind": kind,
            "hidden_size": hidden,
            "intermediate_size": target_config.get("intermediate_size") or 4 * hidden,
            "num_attention_heads": heads,
            "num_key_value_heads": target_config.get("num_key_value_heads") or heads,
            "head_dim": target_config.get("head_dim") or hidden // heads,
            "vocab_size": target_config["vocab_size"],
            "draft_vocab_size": target_config["vocab_size"],
            "max_position_embeddings": target_config.get("max_position_embeddings", 2048),
            "rope_parameters": rope_of(target_config),
            "rms_norm_eps": target_config.get("rms_norm_eps", 1e-6),
        }
        values.update({name: value for name, value in overrides.items() if value is not None})
        if kind == "eagle3" and not values.get("feature_layers"):
            values["feature_layers"] = default_layers(depth)
        values["feature_layers"] = tuple(values.get("feature_layers", ()))
        _size(values, "intermediate_size")  # Gemma 3n has one for each layer
        config = cls(**values)
        config.layers_for(depth)
        return config

    def to_json(self) -> dict[str, Any]:
        """Return config.json: for eagle3 the layout that vLLM and SGLang both load."""
        rope = dict(self.rope_parameters)
        scaling = {key: value for key, value in rope.items() if key != "rope_theta"}
        value: dict[str, Any] = {
            "architectures": [_ARCHITECTURES[self.kind]],
            "model_type": "llama",
            "hidden_size": self.hidden_size,
            "intermediate_size": self.intermediate_size,
            "num_hidden_layers": self.num_hidden_layers,
            "num_attention_heads": self.num_attention_heads,
            "num_key_value_heads": self.num_key_value_heads,
            "head_dim": self.head_dim,
            "vocab_size": self.vocab_size,
            "draft_vocab_size": self.draft_vocab_size,
            "rms_norm_eps": self.rms_norm_eps,
            "hidden_act": self.hidden_act,
            "attention_bias": self.attention_bias,
            "mlp_bias": False,
            "tie_word_embeddings": False,
            "max_position_embeddings": self.max_position_embeddings,
            "rope_theta": rope["rope_theta"],
            "rope_scaling": None if rope["rope_type"] == "default" else scaling,
            "rope_parameters": rope,
            "torch_dtype": self.dtype,
            "dtype": self.dtype,
        }
        if self.sliding_window is not None:
            value["sliding_window"] = self.sliding_window
            value["layer_types"] = ["sliding_attention"] * self.num_hidden_layers
        if self.kind == "eagle3":
            value |= self._eagle3_keys()
        value[_OWN_KEY] = {
            name: list(entry) if isinstance(entry := getattr(self, name), tuple) else entry for name in _OWN
        }
        return value

    def _eagle3_keys(self) -> dict[str, Any]:
        """Layer ids in both conventions: vLLM's v captures hs[v], SGLang's v captures hs[v+1]."""
        layers = list(self.feature_layers)
        value: dict[str, Any] = {"fc_norm": self.fc_norm, "norm_output": self.norm_output}
        value |= {name: True for name in ("norm_before_fc", "norm_before_residual") if getattr(self, name)}
        if self.target_hidden_size is not None and self.target_hidden_size != self.hidden_size:
            value["target_hidden_size"] = self.target_hidden_size
        if layers:
            value["eagle_aux_hidden_state_layer_ids"] = layers
            value["num_aux_hidden_states"] = len(layers)
            value["eagle_config"] = {"use_aux_hidden_state": True}
            if layers[0] >= 1:  # hs[0] cannot be said in SGLang's ids
                value["eagle_config"]["eagle_aux_hidden_state_layer_ids"] = [k - 1 for k in layers]
        return value

    @classmethod
    def from_json(cls, value: Mapping[str, Any], where: str = "config.json") -> HeadConfig:
        """Read what `to_json` wrote; another's goes through `foreign_config`. UserError for missing keys."""
        given = {**value, **(value.get(_OWN_KEY) or {})}
        names = [entry.name for entry in dataclasses.fields(cls) if given.get(entry.name) is not None]
        if missing := [name for name in _NEEDED if name not in names]:
            raise UserError(f"{where}: lacks {', '.join(missing)}; is this a draft head's config.json?")
        values = {name: given[name] for name in names}
        values["rope_parameters"] = rope_of(value)
        values["feature_layers"] = tuple(values.get("feature_layers", ()))
        return cls(**values)


_NEEDED = [
    entry.name
    for entry in dataclasses.fields(HeadConfig)
    if entry.default is dataclasses.MISSING and entry.name != "rope_parameters"
]


def _size(values: Mapping[str, Any], name: str) -> int:
    """Return a size that every head takes from its target; raise UserError where it is not one number."""
    if not isinstance(values.get(name), int):
        raise UserError(
            f"the target's config: {name}: got {values.get(name, 'nothing')}, wanted one number; "
            "no head can be made for this family"
        )
    return values[name]


def is_own(value: Mapping[str, Any]) -> bool:
    """True for a config.json that `HeadConfig.to_json` wrote."""
    return isinstance(value.get(_OWN_KEY), Mapping)


def check_window(config: HeadConfig, longest: int, where: str) -> None:
    """Raise UserError where rows are so long that full attention is not what the head does."""
    if config.sliding_window is not None and longest > config.sliding_window:
        raise UserError(
            f"{where}: the head sees {config.sliding_window} tokens, the longest row has {longest}, and "
            "without decoding attention is computed over whole rows; use rows cut to that length"
        )


def default_layers(num_target_layers: int) -> tuple[int, ...]:
    """Return (2, n//2, n-3), the layers EAGLE-3 captures; UserError for n < 7, where they coincide."""
    n = num_target_layers
    if n < 7:
        raise UserError(
            f"target has {n} layers: the default layers 2, n//2, n-3 need 7 or more; give layer ids"
        )
    return (2, n // 2, n - 3)
