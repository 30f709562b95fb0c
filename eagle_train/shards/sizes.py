"""The bytes that an extraction will take on disk, file by file, from its plan alone."""

from __future__ import annotations

import json
from math import ceil
from typing import Any

from eagle_train.shards.files import DTYPE_NAMES
from eagle_train.shards.manifest import described
from eagle_train.shards.plan import RowTable
from eagle_train.shards.schema import HEADER_KEY, Plan
from eagle_train.shards.tensors import tensor_bytes, tensor_shapes
from eagle_train.shards.writer import shard_header

_ENTRY = 320  # bytes of one shard in the manifest
_FREQUENCY = 18  # and of one token's frequency
_SMALL = 1000  # headers of the other files


def directory_size(plan: Plan, table: RowTable, num_frequencies: int, target_bytes: int) -> int:
    """Return the bytes of all files that extraction writes, when no row is bad.

    `num_frequencies` distinct tokens are supervised; `target_bytes` is what target.safetensors and
    target.json hold.
    """
    shards = sum(file_size(plan, number, table) for number in range(len(plan.shards)))
    manifest = len(json.dumps(described(plan.setting), indent=2)) + _ENTRY * len(plan.shards)
    manifest += _FREQUENCY * num_frequencies
    return shards + _index_size(table) + len(plan.text()) + manifest + target_bytes + 3 * _SMALL


def file_size(plan: Plan, number: int, table: RowTable) -> int:
    """Return the bytes that shard `number` takes as a file, when no row of it is bad."""
    shard = plan.shards[number]
    num_spans = sum(len(table.spans[row]) for row in shard.rows)
    shapes = tensor_shapes(plan.setting, len(shard.rows), num_spans, shard.tokens, shard.labels)
    header = shard_header(plan, number, table, [], dict.fromkeys(shapes, "0" * 64))
    entries: dict[str, Any] = {"__metadata__": {HEADER_KEY: json.dumps(header)}}
    at = 0
    for name, (dtype, shape) in shapes.items():
        size = tensor_bytes({name: (dtype, shape)})
        entries[name] = {"dtype": DTYPE_NAMES[dtype], "shape": shape, "data_offsets": [at, at + size]}
        at += size
    text = json.dumps(entries, separators=(",", ":"))
    return 8 + ceil(len(text) / 8) * 8 + at


def _index_size(table: RowTable) -> int:
    """Five numbers a row, two a span, and the ids."""
    listed = (table.row_ids, table.conversation_ids, *([table.categories] if any(table.categories) else []))
    ids = (json.dumps(names, ensure_ascii=False) for names in listed)
    spans = sum(len(spans) for spans in table.spans)
    return 8 * (5 * len(table) + 1 + 2 * spans) + sum(len(text.encode()) for text in ids)
