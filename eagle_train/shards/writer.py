"""Filling one shard in memory and writing it, whole or not at all; closing a finished directory."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from eagle_train.errors import UserError
from eagle_train.io import save_tensors, sha256_bytes, write_json
from eagle_train.provenance import tool_version
from eagle_train.shards.files import ShardFile, checksum, open_shard
from eagle_train.shards.plan import RowTable, num_labels
from eagle_train.shards.schema import (
    FORMAT_VERSION,
    HEADER_KEY,
    INDEX,
    MANIFEST,
    Plan,
    Setting,
    shard_name,
    tensor_shapes,
)


class ShardBuffer:
    """The tensors of one planned shard, allocated once and filled batch after batch.

    `put` may copy asynchronously from a GPU into page-locked memory: synchronise before `finish`.
    """

    def __init__(self, plan: Plan, number: int, table: RowTable) -> None:
        self.plan, self.number, self.table = plan, number, table
        shard = plan.shards[number]
        self.rows = shard.rows
        num_spans = sum(len(table.spans[row]) for row in self.rows)
        shapes = tensor_shapes(plan.setting, len(self.rows), num_spans, shard.tokens, shard.labels)
        pin = plan.setting.device == "cuda" and torch.cuda.is_available()
        self.tensors = {
            name: torch.empty(shape, dtype=dtype, pin_memory=pin) for name, (dtype, shape) in shapes.items()
        }
        self.witness = torch.empty(shard.tokens, dtype=torch.float32, pin_memory=pin)
        self._at = {"token": 0, "label": 0}

    def put(
        self,
        input_ids: Tensor,
        aux: Tensor | None,
        last: Tensor,
        label_argmax: Tensor,
        label_lse: Tensor,
        witness: Tensor,
    ) -> None:
        """Append one batch, flat: input_ids [n], aux [n, 3H], last [n, H] or [m, H], labels [m].

        `witness` float32 [n] is finite exactly where all features of a token are.
        """
        token, label = self._at["token"], self._at["label"]
        tokens, labels = slice(token, token + len(input_ids)), slice(label, label + len(label_argmax))
        self.tensors["input_ids"][tokens].copy_(input_ids, non_blocking=True)
        self.witness[tokens].copy_(witness, non_blocking=True)
        if aux is not None:
            self.tensors["aux"][tokens].copy_(aux, non_blocking=True)
        per_token = len(self.tensors["last"]) == len(self.witness)
        self.tensors["last"][tokens if per_token else labels].copy_(last, non_blocking=True)
        self.tensors["label_argmax"][labels].copy_(label_argmax, non_blocking=True)
        self.tensors["label_lse"][labels].copy_(label_lse, non_blocking=True)
        self._at = {"token": tokens.stop, "label": labels.stop}

    def bad_rows(self) -> list[int]:
        """Return the rows with a feature that is not finite."""
        bad_tokens = ~torch.isfinite(self.witness)
        if not bool(bad_tokens.any()):
            return []
        owner = np.repeat(np.array(self.rows), self.table.lengths[list(self.rows)])
        return sorted({int(row) for row in owner[bad_tokens.numpy()]})

    def finish(self, folder: Path, most_bad: int) -> int:
        """Write the shard without its bad rows and return their number.

        Raises UserError, and writes nothing, when more than `most_bad` rows are bad or all of several;
        also on a full disk.
        """
        bad = set(self.bad_rows())
        if len(bad) > most_bad or 1 < len(bad) == len(self.rows):
            raise UserError(
                f"row {self.table.row_ids[min(bad)]}: features are NaN or infinite, as in {len(bad)} of the "
                f"{len(self.rows)} rows of shard {self.number} (at most {most_bad} more may be skipped); "
                "try --dtype fp32, or --max-bad-rows to skip more"
            )
        if bad:
            self._drop(bad)
        rows = [row for row in self.rows if row not in bad]
        tensors = {**self.tensors, **_ragged(self.table, rows)}
        header = {
            "format_version": FORMAT_VERSION,
            "plan": self.plan.identity,
            "shard": self.number,
            **_described(self.plan.setting),
            "tokens": len(tensors["input_ids"]),
            "labels": len(tensors["label_argmax"]),
            "row_ids": [self.table.row_ids[row] for row in rows],
            "conversation_ids": [self.table.conversation_ids[row] for row in rows],
            "skipped": [_skipped(self.table, row) for row in sorted(bad)],
            "checksums": {name: checksum(tensor) for name, tensor in sorted(tensors.items())},
        }
        save_tensors(folder / shard_name(self.number), tensors, {HEADER_KEY: json.dumps(header)})
        return len(bad)

    def _drop(self, bad: set[int]) -> None:
        lengths = self.table.lengths[list(self.rows)]
        labels = np.array([num_labels(self.table.spans[row]) for row in self.rows])
        good = np.array([row not in bad for row in self.rows])
        keep_tokens = torch.from_numpy(np.repeat(good, lengths))
        keep_labels = torch.from_numpy(np.repeat(good, labels))
        for name in ("input_ids", "aux", "last", "label_argmax", "label_lse"):
            tensor = self.tensors.get(name)
            if tensor is not None:
                per_token = len(tensor) == len(keep_tokens)
                self.tensors[name] = tensor[keep_tokens if per_token else keep_labels]


def _ragged(table: RowTable, rows: list[int]) -> dict[str, Tensor]:
    """Return where rows and spans start and which tokens are supervised."""
    lengths = table.lengths[rows]
    row_starts = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    counts = [len(table.spans[row]) for row in rows]
    mask = np.zeros(int(row_starts[-1]), dtype=np.uint8)
    for start, row in zip(row_starts[:-1], rows, strict=True):
        for s, e in table.spans[row]:
            mask[start + s : start + e + 1] = 1
    spans = np.array([span for row in rows for span in table.spans[row]], dtype=np.int64).reshape(-1, 2)
    arrays = {
        "rows": np.array(rows, dtype=np.int64),
        "row_starts": row_starts,
        "span_starts": np.concatenate([[0], np.cumsum(counts)]).astype(np.int64),
        "spans": spans,
        "loss_mask": mask,
    }
    return {name: torch.from_numpy(array) for name, array in arrays.items()}


def _skipped(table: RowTable, row: int) -> dict[str, Any]:
    return {"row": row, "row_id": table.row_ids[row], "reason": "features not finite"}


def _described(setting: Setting) -> dict[str, Any]:
    """What a reader wants to know of the setting, in shards and manifest alike."""
    return {
        "features": setting.features,
        "layer_ids": list(setting.layer_ids),
        "codec": setting.codec,
        "hidden_size": setting.hidden_size,
        "vocab_size": setting.vocab_size,
        "num_layers": setting.num_layers,
        "target": setting.target,
        "rows_fingerprint": setting.rows_fingerprint,
        "tokenizer_fingerprint": setting.tokenizer_fingerprint,
    }


def finished_shard(folder: Path, plan: Plan, number: int) -> ShardFile | None:
    """Return shard `number` when it lies there whole and belongs to `plan`, else None."""
    if not (folder / shard_name(number)).is_file():
        return None
    try:
        shard = open_shard(folder / shard_name(number))
        if shard.header.get("plan") != plan.identity:
            return None
        _verify_once(shard.path, shard.path.stat().st_mtime_ns, shard.size)
    except UserError:
        return None
    return shard


@functools.cache
def _verify_once(path: Path, changed: int, size: int) -> None:
    """Compare a shard's checksums, once for each state of the file; raise UserError where damaged."""
    open_shard(path).verify()


def close_directory(folder: Path, plan: Plan, rows_info: dict[str, Any]) -> dict[str, Any]:
    """Write the index and then the manifest over finished shards; return the manifest.

    Any worker may do it, more than one too: the content depends on the shards alone. Raises UserError
    when a shard is missing.
    """
    shards = [open_shard(folder / shard_name(number)) for number in range(len(plan.shards))]
    save_tensors(folder / INDEX, _index(shards))
    manifest = {
        "format_version": FORMAT_VERSION,
        "plan": plan.identity,
        **_described(plan.setting),
        "device": plan.setting.device,
        "threads": plan.setting.threads,
        "num_rows": sum(len(shard.header["row_ids"]) for shard in shards),
        "tokens": sum(shard.header["tokens"] for shard in shards),
        "labels": sum(shard.header["labels"] for shard in shards),
        "skipped": [row for shard in shards for row in shard.header["skipped"]],
        "tool_version": tool_version(),
        "shards": [
            {
                "file": shard.path.name,
                "bytes": shard.size,
                "rows": len(shard.header["row_ids"]),
                "tokens": shard.header["tokens"],
                "labels": shard.header["labels"],
                "checksum": sha256_bytes(json.dumps(shard.header["checksums"]).encode()),
            }
            for shard in shards
        ],
        "supervised_frequencies": rows_info.get("supervised_frequencies", {}),
    }
    write_json(folder / MANIFEST, manifest)
    return manifest


def _index(shards: list[ShardFile]) -> dict[str, Tensor]:
    """Return, for all rows in the order of the prepared rows: shard, slot, length, spans and ids."""
    mapped = [shard.map() for shard in shards]
    rows = torch.cat([tensors["rows"] for tensors in mapped])
    order = torch.argsort(rows)
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
