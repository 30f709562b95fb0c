"""Write the directory that a serving engine loads, whole or not at all, and check it before it shows."""

from __future__ import annotations

import copy
import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from eagle_train.errors import UserError
from eagle_train.evaluation.heads import checkpoint_of
from eagle_train.export.card import is_hub_id, model_card, serve_command
from eagle_train.export.folder import check_free, folder_bytes
from eagle_train.export.layout import GUESSES, as_served, check_engine, engine_config, engine_tensors
from eagle_train.export.refusals import Refusal, refusals, remedy
from eagle_train.export.source import Source, TargetFacts, find_source
from eagle_train.export.verify import REFERENCE_FOLDER, verify, write_reference
from eagle_train.heads.config import HeadConfig
from eagle_train.heads.disk import CONFIG, WEIGHTS, Head, head_tensors
from eagle_train.heads.foreign import read_any
from eagle_train.io.checksums import sha256_file
from eagle_train.io.tensors import save_tensors
from eagle_train.io.text import write_json, write_text
from eagle_train.io.whole_folder import replacing_folder
from eagle_train.progress import bytes_text
from eagle_train.provenance import tool_version
from eagle_train.targets.load import DTYPES, parse_dtype
from eagle_train.training.trained_on import PROVENANCE

CARD = "README.md"
_MADE_BY = "eagle export"
_FILES = {CONFIG, WEIGHTS, PROVENANCE, CARD, REFERENCE_FOLDER}
_ONE_DIRECTORY = ("vllm", "sglang")  # which load the same EAGLE-3 directory


def export(
    source: str | Path,
    out: str | Path,
    *,
    engine: str,
    dtype: str = "auto",
    overwrite: bool = False,
    target: str | None = None,
) -> dict[str, Any]:
    """Write the head of a run (its best) or of a head directory to `out` for `engine`; return what was made.

    `dtype` is bf16, fp16, fp32, keep (as trained), or auto: that of the target's own checkpoint, since
    evaluation and engines both cast the head to what the target runs in; where the target's config.json
    is not at hand, that in which the run saw the target; else keep. `target` overrides the target's name
    that the head records.

    Nothing appears at `out` before the files are read back and found right. Raises UserError where the
    engine would not compute what the head does, where `out` holds something else, or where what was
    written is not the head.
    """
    check_engine(engine)
    final = Path(os.path.abspath(out))
    found = find_source(source)
    check_free(final, _MADE_BY, _FILES, [found.folder, found.run or found.folder], overwrite)
    head = read_any(found.folder, num_target_layers=found.target(target or "").num_layers)
    named = target or head.config.target
    facts = found.target(named)
    public = named if target or not _is_path(named) else Path(named).name
    head.config = _completed(head.config, facts, public)
    _check_served(head, engine, facts, source)
    served = as_served(head, engine)
    stored = _choose_dtype(dtype, facts.dtype, served)
    config = replace(served.config, dtype=_long(stored))
    record = _provenance(found, config, engine, head, facts)
    with replacing_folder(final) as folder:
        tensors = engine_tensors(head_tensors(served, stored), config, engine)
        save_tensors(folder / WEIGHTS, tensors, {"format": "pt"})
        write_json(folder / CONFIG, engine_config(config, engine))
        change = verify(folder, served, config, engine, stored)
        record |= {"weights_sha256": sha256_file(folder / WEIGHTS), "logits_changed_by": change}
        write_json(folder / PROVENANCE, record)
        write_reference(folder, copy.deepcopy(served).to(stored))
        write_text(
            folder / CARD, model_card(record, config, final.name, _commands(record, public, final.name))
        )
    summary = {
        "out": str(out),
        "engine": engine,
        "checkpoint": checkpoint_of(source),
        "size": bytes_text(folder_bytes(final)),
        "serve": _commands(record, named, str(out)),
        "target_path": None if public == named else named,
    }
    return summary | {key: record[key] for key in _SUMMARY}


_SUMMARY = ("kind", "dtype", "target", "source", "recipe", "acceptance", "logits_changed_by", "refused")


def _is_path(name: str) -> bool:
    """True for a target's name that means something on this machine alone."""
    return os.path.isabs(name) or name.startswith(".") or Path(name).exists()


def _check_served(head: Head, engine: str, facts: TargetFacts, where: str | Path) -> None:
    """Raise UserError where `engine` would not compute the head, or cannot be told its target."""
    if reasons := refusals(head, engine, facts.num_layers, facts.model_type):
        raise UserError(f"{where}: cannot be exported for {engine}: {_sentences(reasons)}{remedy(reasons)}")
    if engine == "speculators" and not is_hub_id(head.config.target):
        raise UserError(
            f"{where}: a speculators config names its target by hub id, the head names "
            f"{head.config.target or 'none'}; give --target OWNER/NAME"
        )


def _sentences(reasons: Sequence[Refusal]) -> str:
    return "; ".join(one.why for one in reasons)


def _choose_dtype(dtype: str, target_dtype: str | None, head: Head) -> torch.dtype:
    """Return the dtype to store; the target's own where it is one of the known."""
    kept = next(head.parameters()).dtype
    if dtype == "auto":
        return {_long(known): known for known in DTYPES.values()}.get(str(target_dtype), kept)
    if dtype == "keep":
        return kept
    try:
        return parse_dtype(dtype) or kept
    except UserError as error:
        raise UserError(f"--{error}; keep stores it as trained") from error


def _completed(config: HeadConfig, facts: TargetFacts, name: str) -> HeadConfig:
    """Return the config with what the target says: its name, the default layers, how long texts may be.

    A head started from another's weights may know a shorter limit, which engines would enforce. Under
    longrope the limit decides the frequencies, so there it stays.
    """
    changes: dict[str, Any] = {"target": name}
    if config.kind == "eagle3" and not config.feature_layers and facts.num_layers is not None:
        changes["feature_layers"] = config.layers_for(facts.num_layers)
    if config.rope_parameters["rope_type"] != "longrope":
        changes["max_position_embeddings"] = max(config.max_position_embeddings, facts.max_positions or 0)
    return replace(config, **changes)


def _provenance(
    source: Source, config: HeadConfig, engine: str, head: Head, target: TargetFacts
) -> dict[str, Any]:
    """Return provenance.json: names instead of paths, and no time, so equal heads give equal bytes."""
    shared = config.kind == "eagle3" and engine in _ONE_DIRECTORY
    others = [other for other in _ONE_DIRECTORY if other != engine] if shared else []
    reasons = {other: refusals(head, other, target.num_layers, target.model_type) for other in others}
    refused = {other: _sentences(why) for other, why in reasons.items() if why}
    return {
        "format_version": 1,
        "made_by": _MADE_BY,
        "tool_version": tool_version(),
        "engines": [engine, *(other for other in others if other not in refused)],
        "refused": refused,
        "kind": config.kind,
        "dtype": config.dtype,
        "guesses": config.medusa_heads or GUESSES,
        "target": {
            "name": config.target,
            "revision": target.revision,
            "fingerprint": target.fingerprint,
            "dtype": target.dtype,
        },
        "source": {
            "run": source.run.name if source.run else None,
            "head": source.name,
            "weights_sha256": source.weights_sha256(),
        },
        "recipe": source.recipe_name,
        "data": source.data(),
        "acceptance": source.acceptance(),
    }


def _commands(record: dict[str, Any], target: str, head: str) -> dict[str, str]:
    """Return the serve command of each engine that loads the export at `head`, in the target's own dtype."""
    served, guesses = record["target"]["dtype"], record["guesses"]
    dtype = served if served in map(_long, DTYPES.values()) else record["dtype"]
    return {
        engine: serve_command(engine, record["kind"], target or "TARGET", head, dtype, guesses)
        for engine in record["engines"]
    }


def _long(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
