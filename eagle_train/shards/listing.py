"""Reading the manifest: every field is checked here, so that no reader meets an edited one."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from eagle_train.errors import UserError
from eagle_train.io.text import read_json
from eagle_train.shards.codecs import CODECS
from eagle_train.shards.schema import (
    FEATURES,
    LAYER_CONVENTION,
    MANIFEST,
    PLAN,
    holds_aux,
    mend,
    refuse_version,
    shard_number,
)

Rule = tuple[Callable[[Any], bool], str]  # what a value must meet, and in words


def _whole(least: int) -> Rule:
    return lambda value: type(value) is int and value >= least, f"a whole number from {least}"


def _one_of(*known: str) -> Rule:
    return lambda value: isinstance(value, str) and value in known, f"one of {', '.join(known)}"


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and bool(value)


_TEXT: Rule = (_is_text, "a text")
_TEXT_OR_NONE: Rule = (lambda value: value is None or _is_text(value), "a text")
_PLAN: Rule = (lambda value: bool(re.fullmatch("[0-9a-f]{16}", str(value))), "16 hex digits")
_OBJECT: Rule = (lambda value: isinstance(value, dict), "an object")
_LIST: Rule = (lambda value: isinstance(value, list), "a list")
_FIELDS: dict[str, Rule] = {
    "plan": _PLAN,
    "features": _one_of(*FEATURES),
    "layer_ids": (
        lambda ids: isinstance(ids, list) and all(type(k) is int and k >= 0 for k in ids),
        "a list of whole numbers",
    ),
    "codec": _one_of(*CODECS),
    "hidden_size": _whole(1),
    "vocab_size": _whole(1),
    "num_layers": _whole(1),
    "target": _OBJECT,
    "num_rows": _whole(0),
    "tokens": _whole(0),
    "labels": _whole(0),
    "skipped": _LIST,
    "shards": _LIST,
    "supervised_frequencies": _OBJECT,
}
_MAY_LACK: dict[str, Rule] = {
    "layer_convention": (lambda value: value == LAYER_CONVENTION, json.dumps(LAYER_CONVENTION)),
    "rows_fingerprint": _TEXT_OR_NONE,
    "tokenizer_fingerprint": _TEXT_OR_NONE,
    "target_checksum": _TEXT_OR_NONE,
    "assembled": (lambda value: isinstance(value, bool), "true or false"),
    "index_checksum": _TEXT_OR_NONE,
    "label_top_k": (
        lambda value: value is None or (type(value) is int and value > 0),
        "a whole number from 1",
    ),
    "label_mass": (lambda value: type(value) is float and 0 <= value < 1.01, "a share"),
}
_TARGET: dict[str, Rule] = {"name": _TEXT, "fingerprint": _TEXT, "dtype": _TEXT}
_SKIPPED: dict[str, Rule] = {"row_id": _TEXT}
_SHARD: dict[str, Rule] = {
    "file": (
        lambda name: isinstance(name, str) and shard_number(name) is not None,
        "a shard's name such as shard-00000.safetensors",
    ),
    "bytes": _whole(1),
    "rows": _whole(0),
    "tokens": _whole(0),
    "labels": _whole(0),
}


class _Wrong(ValueError):
    """What an edited manifest says, and what was wanted."""


def read_manifest(folder: Path) -> dict[str, Any]:
    """Read ``shards.json``; raise UserError when it is missing, damaged, edited or of another version.

    The files that it lists bear the names of shards: they lie in `folder`, each once.
    """
    file = folder / MANIFEST
    if not folder.is_dir():
        raise UserError(
            f"{folder}: no such folder; make it with eagle extract ROWS --target T --out {folder}"
        )
    if not file.is_file():
        state = (
            f"extraction is not finished; {mend(folder)}, it goes on"
            if (folder / PLAN).is_file()
            else "not a folder of shards; wanted the --out of eagle extract"
        )
        if (folder / "rows.json").is_file():
            state = "prepared rows; run eagle extract on them, or train with --online --target T"
        raise UserError(f"{file}: not found; {state}")
    info = read_json(file, mend(folder))
    refuse_version(file, info)
    try:
        _check(info)
    except _Wrong as wrong:
        raise UserError(f"{file}: {wrong}; {mend(folder)}") from wrong
    return info


def find_manifest(folder: Path) -> dict[str, Any] | None:
    """Read ``shards.json``; return None where an extraction is unfinished, which has a plan alone.

    Raises UserError where `folder` is no shard directory, or its manifest is damaged.
    """
    if (folder / PLAN).is_file() and not (folder / MANIFEST).is_file():
        return None
    return read_manifest(folder)


def _check(info: dict[str, Any]) -> None:
    _meet(info, _FIELDS)
    _meet(info, {name: rule for name, rule in _MAY_LACK.items() if name in info})
    _meet(info["target"], _TARGET, "target.")
    for number, entry in enumerate(info["shards"]):
        _meet_object(entry, _SHARD, f"shards[{number}]")
        _meet(entry, {"plan": _PLAN} if "plan" in entry else {}, f"shards[{number}].")
    for number, row in enumerate(info["skipped"]):
        _meet_object(row, _SKIPPED, f"skipped[{number}]")
    for name, each in (("num_rows", "rows"), ("tokens", "tokens"), ("labels", "labels")):
        total = sum(entry[each] for entry in info["shards"])
        _want(info[name] == total, name, info[name], f"{total}, the sum of its shards")
    names = [entry["file"] for entry in info["shards"]]
    _want(len(set(names)) == len(names), "shards", names, "every file once")
    layers, depth = info["layer_ids"], info["num_layers"]
    fits = bool(layers) == holds_aux(info["features"]) and max(layers, default=0) <= depth
    _want(fits, "layer_ids", layers, f"layers of features {info['features']}, of {depth}")
    for token, count in info["supervised_frequencies"].items():
        known = re.fullmatch("0|[1-9][0-9]{0,8}", token) and int(token) < info["vocab_size"]
        _want(bool(known), "supervised_frequencies", token, f"ids of tokens below {info['vocab_size']}")
        _want(type(count) is int and count > 0, f"supervised_frequencies.{token}", count, "a count from 1")


def _meet_object(record: Any, rules: dict[str, Rule], where: str) -> None:
    _want(isinstance(record, dict), where, record, "an object")
    _meet(record, rules, f"{where}.")


def _meet(record: dict[str, Any], rules: dict[str, Rule], where: str = "") -> None:
    for name, (holds, words) in rules.items():
        if name not in record:
            raise _Wrong(f"lacks {where}{name}")
        _want(bool(holds(record[name])), f"{where}{name}", record[name], words)


def _want(met: bool, where: str, got: Any, words: str) -> None:
    if not met:
        raise _Wrong(f"{where}: got {json.dumps(got, default=str)[:60]}, wanted {words}")
