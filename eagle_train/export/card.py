"""How to serve an export, and its README.md: a model card with the exact commands."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

from eagle_train.export.hub import HUB_ID
from eagle_train.export.layout import GUESSES, SWITCHES, engine_config
from eagle_train.export.refusals import NAMES
from eagle_train.heads.config import HeadConfig
from eagle_train.progress import counted
from eagle_train.training.held_out import on_held_out

_METHODS = {
    "vllm": {"eagle1": "eagle", "eagle3": "eagle3", "medusa": "medusa"},
    "speculators": {"eagle3": "eagle3"},
    "sglang": {"eagle1": "EAGLE", "eagle3": "EAGLE3"},
}
_TITLES = {**NAMES, "speculators": "vLLM (speculators layout)"}
_TWO_LISTS = """
`config.json` lists the captured layers twice, for the same states are counted in two ways: vLLM reads
`eagle_aux_hidden_state_layer_ids`, where k is the state that enters layer k; SGLang reads the list of that
name in `eagle_config`, where k is the state that leaves layer k, so each of its numbers is one less."""


def serve_command(engine: str, kind: str, target: str, head: str, dtype: str, guesses: int = GUESSES) -> str:
    """Return the shell command that serves `target` with the exported `head` in a chain of `guesses`.

    `dtype` (float32, bfloat16, float16) is said outright: an engine's own choice for a float32
    checkpoint is half precision. EAGLE's repository has no server: its command loads the pair in Python.
    """
    if engine == "eagle":
        code = (
            "from eagle.model.ea_model import EaModel; import torch; "
            f"EaModel.from_pretrained(use_eagle3={kind == 'eagle3'}, base_model_path={target!r}, "
            f"ea_model_path={head!r}, torch_dtype=torch.{dtype})"
        )
        return f"python -c {shlex.quote(code)}"
    method = _METHODS[engine][kind]
    if engine in ("vllm", "speculators"):
        setting = json.dumps({"method": method, "model": head, "num_speculative_tokens": guesses})
        return f"vllm serve {shlex.quote(target)} --dtype {dtype} --speculative-config {shlex.quote(setting)}"
    return (
        f"python -m sglang.launch_server --model-path {shlex.quote(target)} --dtype {dtype} "
        f"--speculative-algorithm {method} --speculative-draft-model-path {shlex.quote(head)} "
        f"--speculative-num-steps {guesses} --speculative-eagle-topk 1 "
        f"--speculative-num-draft-tokens {guesses + 1}"
    )


def model_card(record: dict[str, Any], config: HeadConfig, folder: str, commands: dict[str, str]) -> str:
    """Return README.md of the export `folder` from its provenance and the serve command of each engine."""
    target = config.target
    tags = ["speculative-decoding", "eagle", config.kind]
    front = ["---", *([f"base_model: {target}"] if is_hub_id(target) else [])]
    front += ["pipeline_tag: text-generation", "tags:"]
    front += [*(f"- {tag}" for tag in tags), "---"]
    kind = {"eagle1": "EAGLE-1", "eagle3": "EAGLE-3", "medusa": "Medusa"}[config.kind]
    lines = [
        *front,
        "",
        f"# {kind} draft head for {target or 'its target'}",
        "",
        "A draft head for speculative decoding: with it the target writes the same text in fewer steps.",
        "It works with no other target.",
        "",
        *_facts(record, config),
        "",
        "## Serve",
        "",
        f"From the folder that holds `{folder}/`:",
    ]
    for engine, command in commands.items():
        lines += ["", f"{_TITLES[engine]}:", "", "```", command, "```"]
    if not target:
        lines += ["", "`TARGET` stands for the hub id or directory of the target."]
    elif not is_hub_id(target):
        named = f"`{target}` is the target's name where this was made"
        lines += ["", f"{named}: its hub id or directory goes there."]
    lines += [f"\nNot for {_TITLES[engine]}: {why}." for engine, why in record["refused"].items()]
    lines += [
        "",
        "Serve it in the dtype given: the head and the target's features are then rounded alike.",
        "`provenance.json` says what it was made from; `check/reference.safetensors` holds inputs and what",
        "the head makes of them, to check a loader with.",
    ]
    if "eagle_aux_hidden_state_layer_ids" in engine_config(config, record["engines"][0]).get(
        "eagle_config", {}
    ):
        lines.append(_TWO_LISTS)
    return "\n".join(lines) + "\n"


def is_hub_id(target: str) -> bool:
    """True for OWNER/NAME that is no folder here."""
    return bool(HUB_ID.fullmatch(target)) and not Path(target).exists()


def _facts(record: dict[str, Any], config: HeadConfig) -> list[str]:
    facts = [f"dtype: {config.dtype}", f"longest text: {config.max_position_embeddings:,} tokens"]
    if config.kind == "medusa":
        facts = [facts[0], f"heads: {config.medusa_heads}, each one token further ahead"]
    if config.kind == "eagle3":
        layers = ", ".join(f"hs[{k}]" for k in config.feature_layers)
        facts.append(f"captured layers: {layers} (hs[k] enters target layer k)")
        if on := [name.replace("_", " ") for name in SWITCHES if getattr(config, name)]:
            facts.append(f"beyond plain EAGLE-3: {', '.join(on)}")
        facts.append(f"draft vocabulary: {config.draft_vocab_size:,} of {config.vocab_size:,} tokens")
    if config.sliding_window is not None:
        facts.append(f"sliding window: {config.sliding_window:,} tokens")
    if record["data"]:
        facts.append(f"trained on shards {record['data']['shards']}")
    if record["recipe"]:
        facts.append(f"recipe: {record['recipe']}")
    if record["acceptance"]:
        facts.append(acceptance_words(record["acceptance"]))
    facts.append(f"made by eagle {record['tool_version']}")
    return [f"- {fact}" for fact in facts]


def acceptance_words(figures: dict[str, Any]) -> str:
    """Say what a run predicted of the exported head, from the record of its `acceptance`."""
    by_position = ", ".join(f"{share:.2f}" for share in figures["accepted_by_position"] or [])
    return (
        f"acceptance length {figures['tau']:.2f} (guesses accepted by position: {by_position}), predicted "
        f"for a greedy {figures['draft']} {on_held_out(figures['held_out_conversations'])}, "
        f"{counted(figures['rounds'], 'round')}"
    )
