"""What an engine would not compute as the head does, each reason by the setting's name.

From the engines' loaders. Most of what is listed here they ignore without a word.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from eagle_train.heads.config import HeadConfig, default_layers
from eagle_train.heads.disk import Head
from eagle_train.heads.medusa import MedusaHead

NAMES = {"vllm": "vLLM", "sglang": "SGLang", "speculators": "speculators", "eagle": "EAGLE's repository"}
_IGNORES = {  # switches of the forward that an engine does not know
    "vllm": ("qk_norm",),
    "sglang": ("qk_norm", "norm_before_residual"),
    "speculators": (),
    "eagle": ("qk_norm", "fc_norm", "norm_output", "norm_before_fc", "norm_before_residual"),
}
_COUNTS_BY_FIRST = ("deepseek_v2", "deepseek_v3", "deepseek_v32", "glm4_moe_lite")  # SGLang 0.5.23


@dataclass(frozen=True)
class Refusal:
    """Why an engine does not take a head, and what a head that it takes would need.

    `setting` is the recipe's. Without one, `anew` says that no head trained from random weights has it, and
    `of_target` that every head of this target has; else `why` itself says what to do.
    """

    why: str
    setting: str = ""
    anew: bool = False
    of_target: bool = False


def refusals(
    head: Head, engine: str, num_target_layers: int | None, target_type: str | None = None
) -> list[Refusal]:
    """Return why `engine` would not compute what the head does, one sentence each; none if it does.

    `num_target_layers` is n where it is known, `target_type` the target's model_type likewise.
    """
    config, name = head.config, NAMES[engine]
    if isinstance(head, MedusaHead):
        return _medusa(config, engine)
    if engine == "speculators" and config.kind != "eagle3":
        why = "vLLM reads EAGLE-3 heads alone in the speculators layout; use --engine vllm"
        return [Refusal(f"kind {config.kind}: {why}")]
    if config.qk_norm and engine == "vllm" and config.kind == "eagle3":
        return [Refusal("qk_norm: vLLM has such heads in its other layout alone; use --engine speculators")]
    found = [
        Refusal(f"{switch}: {name} does not compute it", f"head.{switch}=false")
        for switch in _IGNORES[engine]
        if getattr(config, switch)
    ]
    if config.attention_bias and engine in ("sglang", "eagle"):
        found.append(Refusal(f"attention_bias: {name} drops the biases of q, k, v and o", anew=True))
    if config.sliding_window is not None and not (
        config.kind == "eagle3" and engine in ("vllm", "speculators")
    ):
        why = f"sliding_window is {config.sliding_window}: {name} would attend to everything"
        found.append(Refusal(why, anew=True))
    bias = head.fc.bias
    if config.kind == "eagle1":
        if engine == "vllm" and bias is not None and bool(bias.any()):
            found.append(Refusal("fc.bias is not zero: vLLM drops it silently", anew=True))
    elif config.fc_bias:
        found.append(Refusal(f"fc.bias: {name} has no bias on an EAGLE-3 fc alone", anew=True))
    if config.kind == "eagle3":
        if engine == "eagle" and config.num_hidden_layers != 1:
            why = f"num_hidden_layers is {config.num_hidden_layers}: {name} loads one midlayer"
            found.append(Refusal(why, "head.num_hidden_layers=1"))
        found += _layers(config, engine, num_target_layers, target_type)
    if engine == "eagle":
        found += [Refusal(why, of_target=True) for why in _repository(config, num_target_layers)]
    return found


def remedy(found: Sequence[Refusal]) -> str:
    """Return what to do about refusals, beginning with a semicolon; nothing where they say it themselves."""
    if any(one.of_target for one in found):
        return "; no recipe makes a head of this target for it: choose another --engine"
    settings = dict.fromkeys(one.setting for one in found if one.setting)
    words = [" anew, without --init-from"] if any(one.anew for one in found) else []
    words += (
        [f" with {' '.join(f'--set {shlex.quote(setting)}' for setting in settings)}"] if settings else []
    )
    return f"; train a head for it{','.join(words)}" if words else ""


def _medusa(config: HeadConfig, engine: str) -> list[Refusal]:
    if engine != "vllm":
        return [Refusal(f"kind medusa: {NAMES[engine]} runs no Medusa heads; use --engine vllm")]
    if config.reduced_vocabulary:
        why = f"draft_vocab_size is {config.draft_vocab_size}: vLLM's Medusa heads guess all tokens or none"
        return [Refusal(why, "head.draft_vocab_size=null")]
    return []


def _layers(config: HeadConfig, engine: str, depth: int | None, target_type: str | None) -> Iterator[Refusal]:
    layers, name = config.feature_layers, NAMES[engine]
    if not layers:
        yield Refusal(f"feature_layers: none recorded, so {name} would guess them; give --target")
    elif engine == "eagle" and depth is None:
        yield Refusal(f"feature_layers: {name} goes by the target's depth, not known here; give --target")
    else:
        for why in _other_layers(config, engine, depth, target_type):
            yield Refusal(why, _usual_layers(depth))


def _usual_layers(depth: int | None) -> str:
    """Return the recipe's setting of the layers that every engine captures: those of usual shards."""
    if depth is None or depth < 7:
        return "head.layer_ids=[]"
    return f"head.layer_ids=[{','.join(map(str, default_layers(depth)))}]"


def _other_layers(
    config: HeadConfig, engine: str, depth: int | None, target_type: str | None
) -> Iterator[str]:
    layers, name = config.feature_layers, NAMES[engine]
    if engine == "sglang":
        if layers[0] == 0:
            yield "feature_layers: SGLang cannot capture hs[0], the embeddings"
        if config.feature_width == config.hidden_size:
            yield f"feature_layers {layers}: SGLang leaves out fc where they are as wide as the head"
        if depth is not None and layers[-1] >= depth:
            yield f"feature_layers: SGLang cannot capture hs[{depth}], the last state"
        if target_type in _COUNTS_BY_FIRST and layers[0] != 2:
            yield (
                f"feature_layers {layers}: with {target_type} targets SGLang takes ids for layers' inputs "
                "unless the first is 1, so that only heads that read hs[2] are safe"
            )
    if engine == "eagle" and depth is not None and depth >= 7 and layers != default_layers(depth):
        yield f"feature_layers {layers}: {name} always captures 2, n/2 and n-3"


def _repository(config: HeadConfig, depth: int | None) -> Iterator[str]:
    """What EAGLE's own code, written for Llama-2 and -3, cannot read from a config."""
    name, rope = NAMES["eagle"], config.rope_parameters["rope_type"]
    if config.kind == "eagle3" and depth is not None and depth < 7:
        yield f"feature_layers {config.feature_layers}: {name} always captures 2, n/2 and n-3"
    if config.target_hidden_size:
        yield f"target_hidden_size: {name} does not compute it"
    if rope != "default":
        yield f"rope_type {rope}: {name} rotates without scaling"
    if config.head_dim * config.num_attention_heads != config.hidden_size:
        yield f"head_dim is {config.head_dim}: {name} takes hidden_size / num_attention_heads"
