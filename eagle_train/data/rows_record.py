"""What ``rows.json`` may say: each field of its kind, and totals that are those of the rows beside it."""

from __future__ import annotations

import hashlib
import re
import reprlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from eagle_train.errors import UserError

_Rule = tuple[Callable[[Any], bool], str]  # does a value fit; in words


def _whole(least: int) -> _Rule:
    return lambda value: type(value) is int and value >= least, f"a whole number of {least} or more"


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and value != ""


def _are_counts(value: Any) -> bool:
    return isinstance(value, dict) and all(type(count) is int and count >= 0 for count in value.values())


def _is_end(value: Any) -> bool:
    return value is None or (
        isinstance(value, dict) and _whole(0)[0](value.get("id")) and isinstance(value.get("text"), str)
    )


def _are_records(value: Any, *names: str) -> bool:
    return isinstance(value, list) and all(
        isinstance(one, dict) and all(_is_text(one.get(name)) for name in names) for one in value
    )


_TEXT: _Rule = (_is_text, "a text")
_COUNT = _whole(0)
_COUNTS: _Rule = (_are_counts, "an object of counts")
_OBJECT: _Rule = (lambda value: isinstance(value, dict), "an object")
_FIELDS: dict[str, _Rule] = {
    "target": _TEXT,
    "chat_template": _TEXT,
    "inputs": (_are_records, "a list of objects"),
    "tokenizer_fingerprint": _TEXT,
    "max_length": _whole(2),
    "end_of_turn": (_is_end, "null, or an object of id (0 or more) and text"),
    "rows": _COUNT,
    "tokens": _COUNT,
    "supervised_tokens": _COUNT,
    "rows_digest": (
        lambda value: isinstance(value, str) and re.fullmatch("[0-9a-f]{64}", value) is not None,
        "64 hex digits",
    ),
    "counts": _OBJECT,
    "bad_records": (
        lambda value: _are_records(value, "place", "damage"),
        "a list of objects of place and damage",
    ),
    "supervised_frequencies": (
        lambda value: _are_counts(value) and all(re.fullmatch("[0-9]{1,10}", token) for token in value),
        "an object of counts by token id",
    ),
}
_OF_COUNTS = {
    **dict.fromkeys(("read", "kept", "bad", "copies"), _COUNT),
    **dict.fromkeys(("repaired", "skipped", "truncated"), _COUNTS),
}
_MAY_LACK: dict[str, _Rule] = {
    "categories": _COUNTS,
    "skipped_examples": (
        lambda value: (
            isinstance(value, dict)
            and all(isinstance(one, list) and all(map(_is_text, one)) for one in value.values())
        ),
        "an object of lists of text",
    ),
    "counts.copies_dropped": _COUNT,
    "counts.left_out": _COUNT,
    "counts.repeated": _COUNT,
}


def check_record(info: dict[str, Any], file: Path, again: str) -> None:
    """Raise UserError, ending with the advice `again`, for the first field missing or of another kind."""
    for key, rule in _FIELDS.items():
        _want(rule, info, key, key, file, again)
    for key, rule in _OF_COUNTS.items():
        _want(rule, info["counts"], key, f"counts.{key}", file, again)
    for name, rule in _MAY_LACK.items():
        section, _, key = name.rpartition(".")
        fields = info[section] if section else info
        if key in fields:
            _want(rule, fields, key, name, file, again)
    if ("left_out" in info["counts"]) != ("repeated" in info["counts"]):
        raise UserError(f"{file}: counts: left_out or repeated without the other, wanted both; {again}")


def _want(rule: _Rule, fields: dict[str, Any], key: str, name: str, file: Path, again: str) -> None:
    fits, wanted = rule
    if key not in fields:
        raise UserError(f"{file}: {name} is missing, wanted {wanted}; {again}")
    if not fits(fields[key]):
        raise UserError(f"{file}: {name}: got {reprlib.repr(fields[key])}, wanted {wanted}; {again}")


def check_totals(dataset: Any, info: dict[str, Any], file: Path, again: str) -> None:
    """Raise UserError where tokens, answers or the digest of the rows are not what ``rows.json`` says.

    Lengths, spans and ids are read, the tokens themselves are not.
    """
    import pyarrow.compute as compute

    arrow = dataset.with_format("arrow")
    columns = {name: arrow.select_columns([name])[:][name] for name in ("input_ids", "spans", "row_id")}
    ends = compute.list_flatten(compute.list_flatten(columns["spans"])).to_numpy().reshape(-1, 2)
    lengths = compute.list_value_length(columns["input_ids"])
    digest = hashlib.sha256()
    for part in columns["row_id"].chunks:
        digest.update("".join(map(str, part.to_pylist())).encode())
    supervised = int((ends[:, 1].astype("int64") + 1 - ends[:, 0]).sum())
    found = {
        "tokens": compute.sum(lengths).as_py() or 0,
        "supervised_tokens": supervised,
        "rows_digest": digest.hexdigest(),
    }
    for key, value in found.items():
        if info[key] != value:
            raise UserError(f"{file}: {key}: got {info[key]}, its rows have {value}; {again}")
    if (counted := sum(info["supervised_frequencies"].values())) != supervised:
        raise UserError(
            f"{file}: supervised_frequencies: got {counted} tokens in all, its rows have {supervised}; "
            f"{again}"
        )
    if (longest := compute.max(lengths).as_py() or 0) > info["max_length"]:
        raise UserError(
            f"{file}: max_length: got {info['max_length']}, its longest row has {longest} tokens; {again}"
        )
