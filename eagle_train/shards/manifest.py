"""The manifest over finished shards: written last, read first.

Any worker may write it, more than one too: its content depends on the shards alone.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from eagle_train.errors import UserError
from eagle_train.io import read_json, save_tensors, sha256_bytes, sha256_file, write_json
from eagle_train.provenance import tool_version
from eagle_train.shards import frozen_target
from eagle_train.shards.codecs import CODECS
from eagle_train.shards.files import ShardFile, open_shard
from eagle_train.shards.schema import (
    FEATURES,
    FORMAT_VERSION,
    INDEX,
    MANIFEST,
    PLAN,
    Plan,
    Setting,
    refuse_version,
    shard_name,
)

LAYER_CONVENTION = "k = the residual stream entering layer k, hidden_states[k]"
_AGAIN = "run the same eagle extract again"
_FIELDS: dict[str, type] = {
    "plan": str,
    "features": str,
    "layer_ids": list,
    "codec": str,
    "hidden_size": int,
    "vocab_size": int,
    "num_layers": int,
    "target": dict,
    "num_rows": int,
    "tokens": int,
    "labels": int,
    "skipped": list,
    "shards": list,
    "supervised_frequencies": dict,
}
_SHARD_FIELDS: dict[str, type] = {"file": str, "bytes": int, "rows": int, "tokens": int, "labels": int}


def described(setting: Setting) -> dict[str, Any]:
    """What a reader wants to know of the setting, in shards and manifest alike."""
    return {
        "features": setting.features,
        "layer_ids": list(setting.layer_ids),
        "layer_convention": LAYER_CONVENTION,
        "codec": setting.codec,
        "hidden_size": setting.hidden_size,
        "vocab_size": setting.vocab_size,
        "num_layers": setting.num_layers,
        "target": setting.target,
        "rows_fingerprint": setting.rows_fingerprint,
        "tokenizer_fingerprint": setting.tokenizer_fingerprint,
    }


def close_directory(folder: Path, plan: Plan) -> dict[str, Any]:
    """Write index and manifest over the plan's shards, all of them finished; return the manifest.

    Raises UserError when one is missing.
    """
    setting = plan.setting
    shards = [open_shard(folder / shard_name(number)) for number in range(len(plan.shards))]
    head = {
        "plan": plan.identity,
        **described(setting),
        "device": setting.device,
        "threads": setting.threads,
    }
    return write_manifest(folder, head, shards)


def write_manifest(folder: Path, head: dict[str, Any], shards: Sequence[ShardFile]) -> dict[str, Any]:
    """Write index and manifest over `shards`, which lie in `folder`; `head` says what they are."""
    save_tensors(folder / INDEX, _index(shards))
    target = folder / frozen_target.TENSORS
    manifest = {
        "format_version": FORMAT_VERSION,
        **head,
        "num_rows": sum(len(shard.header["row_ids"]) for shard in shards),
        "tokens": sum(shard.header["tokens"] for shard in shards),
        "labels": sum(shard.header["labels"] for shard in shards),
        "skipped": [row for shard in shards for row in shard.header["skipped"]],
        "tool_version": tool_version(),
        "target_checksum": sha256_file(target) if target.is_file() else None,
        "shards": [_entry(shard) for shard in shards],
        "supervised_frequencies": _frequencies(shards),
    }
    write_json(folder / MANIFEST, manifest)
    return manifest


def _entry(shard: ShardFile) -> dict[str, Any]:
    return {
        "file": shard.path.name,
        "plan": shard.header["plan"],
        "bytes": shard.size,
        "rows": len(shard.header["row_ids"]),
        "tokens": shard.header["tokens"],
        "labels": shard.header["labels"],
        "checksum": sha256_bytes(json.dumps(shard.header["checksums"]).encode()),
    }


def _frequencies(shards: Sequence[ShardFile]) -> dict[str, int]:
    """How often each token is supervised, by ascending id."""
    total = torch.zeros(0, dtype=torch.int64)
    for shard in shards:
        tensors = shard.map()
        counts = torch.bincount(tensors["input_ids"][tensors["loss_mask"].bool()], minlength=len(total))
        counts[: len(total)] += total
        total = counts
    return {str(token): int(total[token]) for token in total.nonzero().flatten().tolist()}


def _index(shards: Sequence[ShardFile]) -> dict[str, Tensor]:
    """Return, for all rows in the order of the prepared rows: shard, slot, length, spans and ids.

    Rows of several plans follow each other plan by plan, in the order in which the plans first appear.
    """
    mapped = [shard.map() for shard in shards]
    plans = list(dict.fromkeys(shard.header["plan"] for shard in shards))
    rows = torch.cat([tensors["rows"] for tensors in mapped])
    stride = int(rows.max()) + 1 if len(rows) else 1
    firsts = [plans.index(shard.header["plan"]) * stride for shard in shards]
    order = torch.argsort(torch.cat([t["rows"] + first for t, first in zip(mapped, firsts, strict=True)]))
    lengths = torch.cat([tensors["row_starts"].diff() for tensors in mapped])[order]
    counts = torch.cat([tensors["span_starts"].diff() for tensors in mapped])
    pieces = torch.cat([tensors["spans"] for tensors in mapped]).split(counts.tolist())
    spans = [pieces[i] for i in order.tolist()]
    zero = torch.zeros(1, dtype=torch.int64)
    tensors = {
        "rows": rows[order],
        "shard": torch.cat([torch.full((len(t["rows"]),), i) for i, t in enumerate(mapped)])[order],
        "slot": torch.cat([torch.arange(len(t["rows"])) for t in mapped])[order],
        "lengths": lengths,
        "span_starts": torch.cat([zero, counts[order].cumsum(0)]),
        "spans": torch.cat(spans) if spans else torch.zeros((0, 2), dtype=torch.int64),
    }
    for name in ("row_ids", "conversation_ids"):
        texts = [text for shard in shards for text in shard.header[name]]
        body = json.dumps([texts[i] for i in order.tolist()], ensure_ascii=False).encode()
        tensors[name] = torch.frombuffer(bytearray(body), dtype=torch.uint8)
    return tensors


def read_manifest(folder: Path) -> dict[str, Any]:
    """Read ``shards.json``; raise UserError when it is missing, damaged, edited or of another version."""
    file = folder / MANIFEST
    if not folder.is_dir():
        raise UserError(
            f"{folder}: no such folder; make it with eagle extract ROWS --target T --out {folder}"
        )
    if not file.is_file():
        state = (
            f"extraction is not finished; {_AGAIN}, it goes on"
            if (folder / PLAN).is_file()
            else "not a folder of shards; wanted the --out of eagle extract"
        )
        raise UserError(f"{file}: not found; {state}")
    info = read_json(file, _AGAIN)
    refuse_version(file, info)
    check_fields(file, info, _FIELDS)
    for number, entry in enumerate(info["shards"]):
        if not isinstance(entry, dict):
            raise UserError(f"{file}: shards[{number}]: got {entry!r}, wanted an object; {_AGAIN}")
        check_fields(file, entry, _SHARD_FIELDS, f"shards[{number}].")
    for name, known in (("features", FEATURES), ("codec", CODECS)):
        if info[name] not in known:
            raise UserError(f"{file}: {name}: got {info[name]!r}, wanted one of {', '.join(known)}; {_AGAIN}")
    if info.get("layer_convention", LAYER_CONVENTION) != LAYER_CONVENTION:
        raise UserError(
            f"{file}: layer_convention: got {info['layer_convention']!r}, wanted {LAYER_CONVENTION!r}; "
            f"{_AGAIN}"
        )
    return info


def check_fields(file: Path, record: dict[str, Any], fields: dict[str, type], where: str = "") -> None:
    """Raise UserError naming the first of `fields` that `record` lacks or holds in another type."""
    for name, kind in fields.items():
        if name not in record:
            raise UserError(f"{file}: lacks {where}{name}; {_AGAIN}")
        if type(record[name]) is not kind:
            got = json.dumps(record[name], default=str)[:60]
            raise UserError(f"{file}: {where}{name}: got {got}, wanted {_WORDS[kind]}; {_AGAIN}")


_WORDS = {str: "a text", int: "a whole number", list: "a list", dict: "an object"}
