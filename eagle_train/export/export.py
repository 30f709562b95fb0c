"""Write the directory that a serving engine loads, whole or not at all, and check it before it shows."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from eagle_train.errors import UserError, nearest
from eagle_train.export.card import model_card, serve_command
from eagle_train.export.layout import ENGINES, as_served, check_engine, engine_config, refusals
from eagle_train.export.source import Source, TargetFacts, find_source
from eagle_train.export.verify import verify
from eagle_train.heads.config import HeadConfig
from eagle_train.heads.disk import CONFIG, WEIGHTS, Head, head_tensors, load_head
from eagle_train.io import make_folder, os_error, read_json, save_tensors, sha256_file, write_json, write_text
from eagle_train.provenance import tool_version
from eagle_train.targets.survey import bytes_text

PROVENANCE, CARD = "provenance.json", "README.md"
_MADE_BY = "eagle export"
_FILES = {CONFIG, WEIGHTS, PROVENANCE, CARD}
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


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
    _check_free(final, found, overwrite)
    head = load_head(found.folder)
    facts = found.target(target or head.config.target)
    head.config = _completed(head.config, facts)
    if reasons := refusals(head, engine, facts.num_layers):
        raise UserError(f"{found.folder}: cannot be exported for {engine}: {'; '.join(reasons)}")
    served = as_served(head, engine)
    stored = _choose_dtype(dtype, facts.dtype, served)
    config = replace(served.config, dtype=_long(stored))
    record = _provenance(found, config, engine, head, facts)
    with _replacing_folder(final) as folder:
        save_tensors(folder / WEIGHTS, head_tensors(served, stored), {"format": "pt"})
        write_json(folder / CONFIG, engine_config(config, engine))
        change = verify(folder, served, config, engine, stored)
        record |= {"weights_sha256": sha256_file(folder / WEIGHTS), "logits_changed_by": change}
        write_json(folder / PROVENANCE, record)
        write_text(folder / CARD, model_card(record, config, final.name, _commands(record, final.name)))
    summary = {"out": str(out), "engine": engine, "size": _size(final), "serve": _commands(record, str(out))}
    return summary | {key: record[key] for key in _SUMMARY}


_SUMMARY = ("kind", "dtype", "target", "source", "recipe", "acceptance", "logits_changed_by", "refused")


def _choose_dtype(dtype: str, target_dtype: str | None, head: Head) -> torch.dtype:
    kept = next(head.parameters()).dtype
    by_long = {_long(value): value for value in DTYPES.values()}
    if dtype == "auto":
        return by_long.get(str(target_dtype), kept)
    if dtype == "keep":
        return kept
    known = {**DTYPES, **by_long}
    if dtype not in known:
        words = ["auto", *DTYPES, "keep"]
        raise UserError(f"--dtype {dtype}: wanted one of {', '.join(words)}{nearest(dtype, words)}")
    return known[dtype]


def _completed(config: HeadConfig, facts: TargetFacts) -> HeadConfig:
    """Return the config with what the target says: its name, the default layers, how long texts may be.

    A head started from another's weights may know a shorter limit, which engines would enforce. Under
    longrope the limit decides the frequencies, so there it stays.
    """
    changes: dict[str, Any] = {"target": facts.name}
    if config.kind == "eagle3" and not config.feature_layers and facts.num_layers is not None:
        changes["feature_layers"] = config.layers_for(facts.num_layers)
    if config.rope_parameters["rope_type"] != "longrope":
        changes["max_position_embeddings"] = max(config.max_position_embeddings, facts.max_positions or 0)
    return replace(config, **changes)


def _provenance(
    source: Source, config: HeadConfig, engine: str, head: Head, target: TargetFacts
) -> dict[str, Any]:
    """Return provenance.json: names instead of paths, and no time, so equal heads give equal bytes."""
    others = [other for other in ENGINES if other != engine] if config.kind == "eagle3" else []
    refused = {other: "; ".join(why) for other in others if (why := refusals(head, other, target.num_layers))}
    return {
        "format_version": 1,
        "made_by": _MADE_BY,
        "tool_version": tool_version(),
        "engines": [engine, *(other for other in others if other not in refused)],
        "refused": refused,
        "kind": config.kind,
        "dtype": config.dtype,
        "target": {
            "name": target.name,
            "revision": target.revision,
            "fingerprint": target.fingerprint,
            "dtype": target.dtype,
        },
        "source": {
            "run": source.run.name if source.run else None,
            "head": source.name,
            "weights_sha256": sha256_file(source.folder / WEIGHTS),
        },
        "recipe": source.recipe_name,
        "acceptance": source.acceptance(),
    }


def _commands(record: dict[str, Any], head: str) -> dict[str, str]:
    """Return the serve command of each engine that loads the export at `head`, in the target's own dtype."""
    target, served = record["target"]["name"] or "TARGET", record["target"]["dtype"]
    dtype = served if served in map(_long, DTYPES.values()) else record["dtype"]
    return {
        engine: serve_command(engine, record["kind"], target, head, dtype) for engine in record["engines"]
    }


def _check_free(final: Path, source: Source, overwrite: bool) -> None:
    """Refuse an `out` whose replacement would cost the user something."""
    if not final.exists() and not final.is_symlink():
        return
    if not final.is_dir():
        raise UserError(f"{final}: is a file; choose another --out")
    resolved = final.resolve()
    for kept in (source.folder, source.run or source.folder, Path.cwd(), Path.home()):
        if kept == resolved or resolved in kept.parents:
            raise UserError(f"{final}: holds {kept}, which an export must not replace; choose another --out")
    held = sorted(entry.name for entry in final.iterdir())
    if overwrite or not held:
        return
    if not is_export(final):
        raise UserError(f"{final}: exists and is no earlier export; choose another --out, or --overwrite it")
    if foreign := [name for name in held if name not in _FILES]:
        raise UserError(
            f"{final}: this earlier export also holds {foreign[0]}, which would be lost; "
            "choose another --out, or --overwrite it"
        )


def is_export(folder: Path) -> bool:
    """True for a directory that `export` wrote."""
    if not (folder / PROVENANCE).is_file():
        return False
    with contextlib.suppress(UserError):
        return read_json(folder / PROVENANCE, "").get("made_by") == _MADE_BY
    return False


@contextlib.contextmanager
def _replacing_folder(final: Path) -> Iterator[Path]:
    """Yield a new folder beside `final`; on success give it that name, on failure leave `final` as it was."""
    make_folder(final.parent)
    fresh = final.with_name(f".{final.name}.{os.getpid()}.tmp")
    old = final.with_name(f".{final.name}.{os.getpid()}.old")
    try:
        shutil.rmtree(fresh, ignore_errors=True)
        fresh.mkdir()
        yield fresh
        if final.exists():
            os.rename(final, old)
        os.rename(fresh, final)
        _sweep(final)
    except OSError as error:
        raise os_error(final, error) from error
    finally:
        if old.exists() and not final.exists():
            os.rename(old, final)
        for left in (fresh, old):
            shutil.rmtree(left, ignore_errors=True)


def _sweep(final: Path) -> None:
    """Delete what killed exports to the same place left under their temporary names."""
    with contextlib.suppress(OSError):  # a folder that may not be listed
        for entry in final.parent.iterdir():
            if re.fullmatch(rf"\.{re.escape(final.name)}\.\d+\.(tmp|old)", entry.name):
                shutil.rmtree(entry, ignore_errors=True)


def _size(folder: Path) -> str:
    return bytes_text(sum(entry.stat().st_size for entry in folder.iterdir()))


def _long(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
