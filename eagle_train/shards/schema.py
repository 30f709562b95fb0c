"""What lies in a shard directory, and the records that describe it.

    plan.json                  what is made from what, which row lies in which shard and batches
    target.safetensors/.json   embedding and output map (frozen_target.py)
    shard-00000.safetensors    flat and ragged: N tokens, R rows, M label positions, no padding
    index.safetensors          where each row lies, its length and spans, for all shards together
    shards.json                the manifest, written last: its presence says that everything is there

A shard's tensors are listed in tensors.py. Its header (safetensors metadata, one key, JSON): the plan's
identity, the shard's number, row and conversation ids, categories where a row of it has one, rows skipped,
and the SHA-256 of every tensor.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, get_origin, get_type_hints

from eagle_train.errors import UserError, nearest
from eagle_train.io.checksums import sha256_json
from eagle_train.io.creating import create_text
from eagle_train.io.text import read_json

FORMAT_VERSION = 1
PLAN = "plan.json"
MANIFEST = "shards.json"
INDEX = "index.safetensors"
HEADER_KEY = "eagle"
LAYER_CONVENTION = "k = the residual stream entering layer k, hidden_states[k]"

FEATURES = ("eagle3", "eagle1", "medusa", "all")
_LEFT_OUT = ("label_top_k", "tensor_parallel")  # of a setting's record, where they are 0


def shard_name(number: int) -> str:
    """Return the file name of shard `number`."""
    return f"shard-{number:05d}.safetensors"


def shard_number(name: str) -> int | None:
    """Return the number of the shard whose file name is exactly `name`, None where no shard has it."""
    found = re.fullmatch(r"shard-([0-9]{5,9})\.safetensors", name)
    return int(found[1]) if found and shard_name(int(found[1])) == name else None


def mend(folder: Path) -> str:
    """Say how what is damaged in `folder` is made anew: merged or split shards have no extraction."""
    if not (folder / PLAN).is_file() and (folder / MANIFEST).is_file():
        return "eagle shards merge or split its sources again, into another --out"
    return "run the same eagle extract again"


def check_features(features: str) -> str:
    """Return `features`; raise UserError for an unknown kind."""
    if features not in FEATURES:
        raise UserError(f"--for {features}: wanted one of {', '.join(FEATURES)}{nearest(features, FEATURES)}")
    return features


def holds_aux(features: str) -> bool:
    """True when shards of this kind hold the residual streams of the chosen layers."""
    return features in ("eagle3", "all")


def holds_all_last(features: str) -> bool:
    """True when shards of this kind hold the final state of every token, not of label positions only."""
    return features in ("eagle1", "all")


def holds_feature_of(kind: str, features: str) -> bool:
    """True when shards of these `features` hold what a head of `kind` reads; for medusa all do."""
    if kind == "medusa":
        return True
    return holds_aux(features) if kind == "eagle3" else holds_all_last(features)


@dataclass(frozen=True)
class Setting:
    """Everything the bytes of the shards depend on, hardware aside."""

    rows_fingerprint: str
    tokenizer_fingerprint: str
    target: dict[str, Any]  # name, revision, fingerprint, dtype
    features: str
    layer_ids: tuple[int, ...]  # hs convention: k = the residual stream entering layer k
    codec: str
    hidden_size: int
    vocab_size: int
    num_layers: int
    device: str  # cpu, cuda
    threads: int  # torch threads of one worker; sums depend on it on a CPU
    batch_tokens: int
    shard_tokens: int
    label_top_k: int = 0  # tokens stored of each label's distribution; 0: its state instead
    tensor_parallel: int = 0  # processes among which every layer is cut; sums depend on it; 0: not cut

    def refuse_other(self, other: Setting, where: Path) -> None:
        """Raise UserError naming the first difference between this (on disk) and `other` (asked for)."""
        known, asked = asdict(self), asdict(other)
        for words, have, want in _differences(known, asked):
            raise UserError(
                f"{where}: these shards are made with {words} {have}; this run has {want}. "
                "Give the same, choose another --out, or delete the folder to start again"
            )


def _differences(known: dict[str, Any], asked: dict[str, Any]) -> list[tuple[str, Any, Any]]:
    found: list[tuple[str, Any, Any]] = []
    if known["target"]["fingerprint"] != asked["target"]["fingerprint"]:
        pair = [f"{side['target']['name']} ({side['target']['fingerprint']})" for side in (known, asked)]
        found.append(("target", pair[0], pair[1]))
    if known["target"]["dtype"] != asked["target"]["dtype"]:
        found.append(("dtype", known["target"]["dtype"], asked["target"]["dtype"]))
    words = {"rows_fingerprint": "rows", "features": "--for", "layer_ids": "layers"}
    words["tensor_parallel"] = "--tensor-parallel"
    for name, value in known.items():
        if name != "target" and value != asked[name]:
            found.append((words.get(name, name.replace("_", " ")), value, asked[name]))
    return found


@dataclass(frozen=True)
class PlannedShard:
    """One shard: which rows, in which batches, and how large."""

    batches: tuple[tuple[int, ...], ...]  # row numbers, in the order they lie in the shard
    tokens: int
    labels: int
    size: int  # bytes of its tensors

    @property
    def rows(self) -> tuple[int, ...]:
        """All its rows, in order."""
        return tuple(row for batch in self.batches for row in batch)


@dataclass(frozen=True)
class Plan:
    """The whole work, fixed before it starts."""

    setting: Setting
    num_rows: int
    shards: tuple[PlannedShard, ...]

    @property
    def tokens(self) -> int:
        """Tokens of all shards."""
        return sum(shard.tokens for shard in self.shards)

    @property
    def labels(self) -> int:
        """Label positions of all shards."""
        return sum(shard.labels for shard in self.shards)

    @property
    def size(self) -> int:
        """Bytes of all shards."""
        return sum(shard.size for shard in self.shards)

    @cached_property
    def identity(self) -> str:
        """16 hex digits that every shard of this plan carries."""
        return sha256_json(self.to_json())[:16]

    def to_json(self) -> dict[str, Any]:
        """Return plain JSON values."""
        return {
            "format_version": FORMAT_VERSION,
            "setting": _recorded(self.setting),
            "num_rows": self.num_rows,
            "tokens": self.tokens,
            "labels": self.labels,
            "bytes": self.size,
            "shards": [
                {
                    "tokens": shard.tokens,
                    "labels": shard.labels,
                    "bytes": shard.size,
                    "batches": [list(batch) for batch in shard.batches],
                }
                for shard in self.shards
            ],
        }

    def text(self) -> str:
        """Return what ``plan.json`` holds: settings readable, one line a shard."""
        record = self.to_json()
        shards = ",\n".join("    " + json.dumps(shard, separators=(",", ":")) for shard in record["shards"])
        head = json.dumps({**record, "shards": []}, indent=2).removesuffix("[]\n}")
        return f"{head}[\n{shards}\n  ]\n}}\n"

    def create(self, folder: Path) -> bool:
        """Write ``plan.json``; return False where there is one already."""
        return create_text(folder / PLAN, self.text())

    @classmethod
    def load(cls, folder: Path) -> Plan:
        """Read ``plan.json``; raise UserError when it is missing, damaged or of another version."""
        record = read_json(folder / PLAN, "run eagle extract")
        refuse_version(folder / PLAN, record)
        try:
            shards = tuple(_planned(shard) for shard in record["shards"])
            plan = cls(_setting(record["setting"]), record["num_rows"], shards)
            rows = sorted(row for shard in shards for row in shard.rows)
            if rows != list(range(len(rows))) or plan.num_rows != len(rows):
                raise ValueError("its batches do not hold every row once")
        except (KeyError, TypeError, ValueError, AttributeError, OverflowError, RecursionError) as error:
            fault = f"{error} is missing" if isinstance(error, KeyError) else str(error)
            raise UserError(
                f"{folder / PLAN}: damaged or edited ({fault}); delete the folder to start again"
            ) from error
        return plan


def _recorded(setting: Setting) -> dict[str, Any]:
    """What is left out counts as 0: plans without top labels are those of before there were any."""
    record = {**asdict(setting), "layer_ids": list(setting.layer_ids)}
    return {name: value for name, value in record.items() if value or name not in _LEFT_OUT}


def _setting(record: dict[str, Any]) -> Setting:
    setting = Setting(**{**record, "layer_ids": tuple(map(_whole, record["layer_ids"]))})
    for name, hint in get_type_hints(Setting).items():
        if type(value := getattr(setting, name)) is not (get_origin(hint) or hint):
            raise TypeError(f"{name}: {value!r}")
    if absent := {"name", "revision", "fingerprint", "dtype"} - set(setting.target):
        raise KeyError(f"target {min(absent)}")
    return setting


def _planned(record: dict[str, Any]) -> PlannedShard:
    batches = tuple(tuple(map(_whole, batch)) for batch in record["batches"])
    return PlannedShard(batches, *(_whole(record[name]) for name in ("tokens", "labels", "bytes")))


def _whole(value: Any) -> int:
    if type(value) is not int or value < 0:
        raise TypeError(f"{value!r}, wanted a whole number")
    return value


def refuse_version(file: Path, record: Mapping[str, Any]) -> None:
    """Raise UserError unless `record` is of this format version."""
    version = record.get("format_version")
    if version != FORMAT_VERSION:
        raise UserError(
            f"{file}: format version {version}, wanted {FORMAT_VERSION}; it was written by another version "
            "of eagle: use that one, or extract again into another --out"
        )
