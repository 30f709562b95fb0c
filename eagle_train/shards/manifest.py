"""Writing the manifest over finished shards: written last, read first (listing.py).

Any worker may write it, more than one too: its content depends on the shards alone.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from eagle_train.io.checksums import sha256_bytes, sha256_file, sha256_json
from eagle_train.io.tensors import save_tensors
from eagle_train.io.text import write_json
from eagle_train.provenance import tool_version
from eagle_train.shards import frozen_target
from eagle_train.shards.files import ShardFile, open_shard
from eagle_train.shards.schema import (
    FORMAT_VERSION,
    INDEX,
    LAYER_CONVENTION,
    MANIFEST,
    Plan,
    Setting,
    shard_name,
    shard_number,
)

# What shards must share to lie in one directory, and how a command line says it.
SAME = {
    "features": "--for",
    "layer_ids": "layers",
    "codec": "codec",
    "label_top_k": "label top k",
    "hidden_size": "hidden size",
    "vocab_size": "vocabulary",
    "num_layers": "number of layers",
    "tokenizer_fingerprint": "tokenizer",
}


def described(setting: Setting) -> dict[str, Any]:
    """What a reader wants to know of the setting, in shards and manifest alike."""
    top = {"label_top_k": setting.label_top_k} if setting.label_top_k else {}
    return {
        "features": setting.features,
        "layer_ids": list(setting.layer_ids),
        "layer_convention": LAYER_CONVENTION,
        "codec": setting.codec,
        **top,
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
        **({"tensor_parallel": setting.tensor_parallel} if setting.tensor_parallel else {}),
    }
    return write_manifest(folder, head, shards)


def write_manifest(folder: Path, head: dict[str, Any], shards: Sequence[ShardFile]) -> dict[str, Any]:
    """Write index and manifest over `shards`, which lie in `folder`; `head` says what they are.

    Killed between the two it leaves an index that the old manifest does not list: readers say so.
    """
    save_tensors(folder / INDEX, index_of(shards))
    target = folder / frozen_target.TENSORS
    manifest = {
        "format_version": FORMAT_VERSION,
        "target_checksum": sha256_file(target) if target.is_file() else None,
        **head,
        "tool_version": tool_version(),
        "index_checksum": sha256_file(folder / INDEX),
        **counted(shards),
    }
    write_json(folder / MANIFEST, manifest)
    return manifest


def counted(shards: Sequence[ShardFile]) -> dict[str, Any]:
    """What a manifest says of its shards one by one and in sum."""
    labels = sum(shard.header["labels"] for shard in shards)
    masses = [shard.header["label_mass"] for shard in shards if "label_mass" in shard.header]
    return {
        "num_rows": sum(len(shard.header["row_ids"]) for shard in shards),
        "tokens": sum(shard.header["tokens"] for shard in shards),
        "labels": labels,
        **({"label_mass": round(sum(masses) / max(labels, 1), 6)} if masses else {}),
        "skipped": [row for shard in shards for row in shard.header["skipped"]],
        "shards": [_entry(shard) for shard in shards],
        "supervised_frequencies": _frequencies(shards),
    }


def in_common(info: dict[str, Any]) -> dict[str, Any]:
    """What all shards of a directory share, of a manifest or of a shard's header, by its name."""
    target = {f"target {name}": info["target"].get(name) for name in ("fingerprint", "dtype")}
    top = {"label_top_k": info.get("label_top_k", 0)}  # not there where whole states are
    return {name: info.get(name) for name in SAME} | top | target


def head_of(info: dict[str, Any]) -> dict[str, Any]:
    """What a manifest says of how its shards were made."""
    own = {
        "format_version",
        "target_checksum",
        "index_checksum",
        "num_rows",
        "tokens",
        "labels",
        "label_mass",
        "skipped",
        "shards",
        "supervised_frequencies",
    }
    return {name: value for name, value in info.items() if name not in own}


def joined_plan(shards: Sequence[ShardFile]) -> str:
    """Return the 16 hex digits that stand for the plan of merged or split shards."""
    return sha256_json([shard.header["checksums"] for shard in shards])[:16]


def rows_held(info: dict[str, Any]) -> str:
    """Return a text that agrees exactly when two manifests list the same rows and features.

    A plan's shards hold the rows that it says, but for those skipped: the plan alone stands for all of them.
    """
    numbers = [shard_number(entry["file"]) for entry in info["shards"]]
    skipped = [row["row_id"] for row in info["skipped"]]
    held = f"{info['plan']}-{info['num_rows']}"
    if numbers == list(range(len(numbers))) and not skipped:
        return held
    return f"{held}-{sha256_json([numbers, skipped])[:8]}"


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


def index_of(shards: Sequence[ShardFile]) -> dict[str, Tensor]:
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
    for name in ("row_ids", "conversation_ids", "categories"):
        if not any(name in shard.header for shard in shards):
            continue  # no row of any has a category
        parts = (shard.header.get(name) or [""] * len(shard.header["row_ids"]) for shard in shards)
        texts = [text for part in parts for text in part]
        body = json.dumps([texts[i] for i in order.tolist()], ensure_ascii=False).encode()
        tensors[name] = torch.frombuffer(bytearray(body), dtype=torch.uint8)
    return tensors
