"""What an engine would not compute as the head does, each reason by the setting's name.

From the engines' loaders. Most of what is listed here they ignore without a word.
"""

from __future__ import annotations

from collections.abc import Iterator

from eagle_train.heads.config import HeadConfig, default_layers
from eagle_train.heads.disk import Head
from eagle_train.heads.medusa import MedusaHead

NAMES = {"vllm": "vLLM", "sglang": "SGLang", "speculators": "speculators", "eagle": "EAGLE's repository"}
_IGNORES = {  # switches of the forward that an engine does not know
    "vllm": ("qk_norm",),
    "sglang": ("qk_norm", "norm_before_residual"),
    "speculators": (),
    "eagle": (
        "qk_norm",
        "fc_norm",
        "norm_output",
        "norm_before_fc",
        "norm_before_residual",
        "target_hidden_size",
    ),
}
_COUNTS_BY_FIRST = ("deepseek_v2", "deepseek_v3", "deepseek_v32", "glm4_moe_lite")  # SGLang 0.5.23


def refusals(
    head: Head, engine: str, num_target_layers: int | None, target_type: str | None = None
) -> list[str]:
    """Return why `engine` would not compute what the head does, one sentence each; none if it does.

    `num_target_layers` is n where it is known, `target_type` the target's model_type likewise.
    """
    config, name = head.config, NAMES[engine]
    if isinstance(head, MedusaHead):
        return _medusa(config, engine)
    if engine == "speculators" and config.kind != "eagle3":
        return [
            f"kind {config.kind}: vLLM reads EAGLE-3 heads alone in the speculators layout; use --engine vllm"
        ]
    if config.qk_norm and engine == "vllm" and config.kind == "eagle3":
        return ["qk_norm: vLLM has such heads in its other layout alone; use --engine speculators"]
    found = [
        f"{switch}: {name} does not compute it" for switch in _IGNORES[engine] if getattr(config, switch)
    ]
    if config.attention_bias and engine in ("sglang", "eagle"):
        found.append(f"attention_bias: {name} drops the biases of q, k, v and o")
    if config.sliding_window is not None and not (
        config.kind == "eagle3" and engine in ("vllm", "speculators")
    ):
        found.append(f"sliding_window is {config.sliding_window}: {name} would attend to everything")
    bias = head.fc.bias
    if config.kind == "eagle1":
        if engine == "vllm" and bias is not None and bool(bias.any()):
            found.append("fc.bias is not zero: vLLM drops it silently; train with fc_bias false")
    elif config.fc_bias:
        found.append(f"fc.bias: {name} has no bias on an EAGLE-3 fc alone")
    if config.kind == "eagle3":
        if engine == "eagle" and config.num_hidden_layers != 1:
            found.append(f"num_hidden_layers is {config.num_hidden_layers}: {name} loads one midlayer")
        found += _layers(config, engine, num_target_layers)
        if engine == "sglang" and target_type in _COUNTS_BY_FIRST and config.feature_layers[:1] != (2,):
            found.append(
                f"feature_layers {config.feature_layers}: with {target_type} targets SGLang takes ids for "
                "layers' inputs unless the first is 1, so that only heads that read hs[2] are safe"
            )
    if engine == "eagle":
        found += _repository(config)
    return found


def _medusa(config: HeadConfig, engine: str) -> list[str]:
    if engine != "vllm":
        return [f"kind medusa: {NAMES[engine]} runs no Medusa heads; use --engine vllm"]
    if config.reduced_vocabulary:
        return [
            f"draft_vocab_size is {config.draft_vocab_size}: vLLM's Medusa heads guess all tokens or none"
        ]
    return []


def _layers(config: HeadConfig, engine: str, depth: int | None) -> Iterator[str]:
    layers, name = config.feature_layers, NAMES[engine]
    if not layers:
        yield f"feature_layers: none recorded, so {name} would guess which layers to capture"
        return
    if engine == "sglang":
        if layers[0] == 0:
            yield "feature_layers: SGLang cannot capture hs[0], the embeddings"
        if config.feature_width == config.hidden_size:
            yield f"feature_layers {layers}: SGLang leaves out fc where they are as wide as the head"
        if depth is not None and layers[-1] >= depth:
            yield f"feature_layers: SGLang cannot capture hs[{depth}], the last state"
    if engine == "eagle":
        if depth is None:
            yield f"feature_layers: {name} goes by the target's depth, not known here; give --target"
        elif depth < 7 or layers != default_layers(depth):
            yield f"feature_layers {layers}: {name} always captures 2, n/2 and n-3"


def _repository(config: HeadConfig) -> Iterator[str]:
    """What EAGLE's own code, written for Llama-2 and -3, cannot read from a config."""
    name, rope = NAMES["eagle"], config.rope_parameters["rope_type"]
    if rope != "default":
        yield f"rope_type {rope}: {name} rotates without scaling"
    if config.head_dim * config.num_attention_heads != config.hidden_size:
        yield f"head_dim is {config.head_dim}: {name} takes hidden_size / num_attention_heads"
