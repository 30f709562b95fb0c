"""Filling one shard in memory and writing it, whole or not at all."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from eagle_train.errors import UserError
from eagle_train.io.tensors import save_tensors
from eagle_train.shards.codecs import CODECS, encode
from eagle_train.shards.files import ShardFile, checksum, open_shard
from eagle_train.shards.manifest import described
from eagle_train.shards.plan import RowTable, num_labels
from eagle_train.shards.schema import (
    FORMAT_VERSION,
    HEADER_KEY,
    Plan,
    shard_name,
)
from eagle_train.shards.tensors import tensor_shapes

_PIECE = 2048  # tokens encoded at once: their float32 copies are all that a GPU holds beside the states
_FROM_THE_TABLE = ("rows", "row_starts", "span_starts", "spans", "loss_mask")


class ShardBuffer:
    """The tensors of one planned shard, allocated once and filled batch after batch.

    `put` copies from GPUs into page-locked memory without waiting; `finish` waits for those GPUs, none of
    which need be the current one.
    """

    def __init__(self, plan: Plan, number: int, table: RowTable) -> None:
        self.plan, self.number, self.table = plan, number, table
        shard = plan.shards[number]
        self.rows = shard.rows
        num_spans = sum(len(table.spans[row]) for row in self.rows)
        shapes = tensor_shapes(plan.setting, len(self.rows), num_spans, shard.tokens, shard.labels)
        pin = plan.setting.device == "cuda" and torch.cuda.is_available()
        self.tensors = {
            name: torch.empty(shape, dtype=dtype, pin_memory=pin)
            for name, (dtype, shape) in shapes.items()
            if name not in _FROM_THE_TABLE
        }
        self.witness = torch.empty(shard.tokens, dtype=torch.float32, pin_memory=pin)
        self._at = {"token": 0, "label": 0}
        self._sources: set[torch.device] = set()

    def put(
        self,
        input_ids: Tensor,
        aux: Tensor | None,
        last: Tensor | None,
        label_argmax: Tensor,
        label_lse: Tensor,
        witness: Tensor,
        top: tuple[Tensor, Tensor] | None = None,
    ) -> None:
        """Encode and append one batch, flat: input_ids [n], aux [n, 3H], last [n, H] or [m, H], labels [m].

        `top` are ids and log-probabilities [m, k] in place of `last`. `witness` float32 [n] is finite exactly
        where all features of a token are.
        """
        token, label = self._at["token"], self._at["label"]
        tokens, labels = slice(token, token + len(input_ids)), slice(label, label + len(label_argmax))
        self._copy("input_ids", tokens, input_ids)
        self._fetch(self.witness[tokens], witness)
        if aux is not None:
            self._encode("aux", tokens, aux, len(self.plan.setting.layer_ids))
        if last is not None:
            per_token = len(self.tensors["last"]) == len(self.witness)
            self._encode("last", tokens if per_token else labels, last, 1)
        if top is not None:
            self._copy("label_ids", labels, top[0])
            self._copy("label_logp", labels, top[1])
        self._copy("label_argmax", labels, label_argmax)
        self._copy("label_lse", labels, label_lse)
        self._at = {"token": tokens.stop, "label": labels.stop}

    def _encode(self, name: str, where: slice, states: Tensor, groups: int) -> None:
        codec = CODECS[self.plan.setting.codec]
        for first in range(0, len(states), _PIECE):
            values, scale = encode(codec, states[first : first + _PIECE], groups)
            part = slice(where.start + first, where.start + first + len(values))
            self._copy(name, part, values)
            if scale is not None:
                self._copy(f"{name}_scale", part, scale)

    def _copy(self, name: str, where: slice, values: Tensor) -> None:
        self._fetch(self.tensors[name][where], values)

    def _fetch(self, place: Tensor, values: Tensor) -> None:
        self._sources.add(values.device)
        place.copy_(values, non_blocking=True)

    def _wait(self) -> None:
        for source in self._sources:
            if source.type == "cuda":
                torch.cuda.synchronize(source)

    def bad_rows(self) -> list[int]:
        """Return the rows with a feature that is not finite."""
        bad_tokens = ~torch.isfinite(self.witness)
        if not bool(bad_tokens.any()):
            return []
        owner = np.repeat(np.array(self.rows), self.table.lengths[list(self.rows)])
        return sorted({int(row) for row in owner[bad_tokens.numpy()]})

    def finish(self, folder: Path, most_bad: int | None) -> int:
        """Write the shard without its bad rows and return their number; with them where `most_bad` is None.

        Raises UserError, and writes nothing, when more than `most_bad` rows are bad or all of several;
        also on a full disk.
        """
        self._wait()
        bad = set() if most_bad is None else set(self.bad_rows())
        if most_bad is not None and (len(bad) > most_bad or 1 < len(bad) == len(self.rows)):
            in_fp32 = self.plan.setting.target["dtype"] == "fp32"
            wider = "look at the target's weights, or give " if in_fp32 else "try --dtype fp32, or "
            raise UserError(
                f"row {self.table.row_ids[min(bad)]}: features are NaN or infinite, as in {len(bad)} of the "
                f"{len(self.rows)} rows of shard {self.number} (at most {most_bad} more may be skipped); "
                f"{wider}--max-bad-rows to skip more"
            )
        if bad:
            self._drop(bad)
        rows = [row for row in self.rows if row not in bad]
        tensors = {**self.tensors, **_ragged(self.table, rows)}
        checksums = {name: checksum(tensor) for name, tensor in sorted(tensors.items())}
        header = shard_header(self.plan, self.number, self.table, sorted(bad), checksums)
        if "label_logp" in tensors:  # how much of the target's probability is kept, summed over labels
            header["label_mass"] = float(tensors["label_logp"].double().exp().sum())
        save_tensors(folder / shard_name(self.number), tensors, {HEADER_KEY: json.dumps(header)})
        return len(bad)

    def _drop(self, bad: set[int]) -> None:
        lengths = self.table.lengths[list(self.rows)]
        labels = np.array([num_labels(self.table.spans[row]) for row in self.rows])
        good = np.array([row not in bad for row in self.rows])
        keep_tokens = torch.from_numpy(np.repeat(good, lengths))
        keep_labels = torch.from_numpy(np.repeat(good, labels))
        for name, tensor in self.tensors.items():
            keep = keep_tokens if len(tensor) == len(keep_tokens) else keep_labels
            flat = tensor.reshape(len(tensor), -1).view(torch.uint8)  # 8-bit floats cannot be indexed
            self.tensors[name] = flat[keep].view(tensor.dtype).reshape(-1, *tensor.shape[1:])


def shard_header(
    plan: Plan, number: int, table: RowTable, bad: Sequence[int], checksums: dict[str, str]
) -> dict[str, Any]:
    """Return what the shard's header says: all of its rows but the `bad` ones, which it lists."""
    shard = plan.shards[number]
    rows = [row for row in shard.rows if row not in bad]
    labels = sum(num_labels(table.spans[row]) for row in rows)
    categories = [table.categories[row] for row in rows] if table.categories else []
    return {
        "format_version": FORMAT_VERSION,
        "plan": plan.identity,
        "shard": number,
        **described(plan.setting),
        "tokens": int(table.lengths[rows].sum()),
        "labels": labels,
        "row_ids": [table.row_ids[row] for row in rows],
        "conversation_ids": [table.conversation_ids[row] for row in rows],
        **({"categories": categories} if any(categories) else {}),
        "skipped": [_skipped(table, row) for row in bad],
        "checksums": checksums,
    }


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


def finished_shard(folder: Path, plan: Plan, number: int) -> ShardFile | None:
    """Return shard `number` when it lies there uncut and belongs to `plan`, else None.

    Only the header is read; `ShardFile.verify` compares the contents.
    """
    try:
        shard = open_shard(folder / shard_name(number))
    except UserError:
        return None
    return shard if shard.header.get("plan") == plan.identity else None


def shard_fault(folder: Path, plan: Plan, number: int) -> str | None:
    """Say what is wrong with the file of shard `number`, all bytes compared; None: it is whole, or absent."""
    file = folder / shard_name(number)
    if not file.is_file():
        return None
    try:
        shard = open_shard(file)
        if shard.header["plan"] != plan.identity:
            return f"{file}: a shard of another plan"
        shard.verify()
    except UserError as error:
        return str(error).rsplit("; ", 1)[0]  # without what to do: it is being done
    return None
