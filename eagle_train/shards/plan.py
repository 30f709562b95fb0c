"""Which row lies in which batch of which shard: a function of the rows alone.

Rows are sorted by length, long ones first, and cut into batches by a budget of padded tokens, so that
little is computed on padding and the first batch is the one that needs the most memory. Batches are
dealt to the shards like cards, so that every shard holds all lengths and about as many tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import ceil
from typing import Any

import numpy as np

from eagle_train.errors import UserError
from eagle_train.io.checksums import sha256_json
from eagle_train.shards.schema import Plan, PlannedShard, Setting
from eagle_train.shards.tensors import tensor_bytes, tensor_shapes

Span = tuple[int, int]

_MOST_SHARD_TOKENS = 32_768
_FEWEST_SHARDS = 16


@dataclass(frozen=True)
class RowTable:
    """What planning and reading need to know of each row."""

    lengths: np.ndarray  # int64 [R] tokens
    spans: list[list[Span]]  # answers, [first, last] inclusive
    row_ids: list[str]
    conversation_ids: list[str]
    categories: list[str] = field(default_factory=list)  # of each row; empty where no row has one

    @classmethod
    def of(cls, dataset: Any) -> RowTable:
        """Read the table of prepared rows (a `datasets.Dataset`) without decoding their tokens.

        Raises UserError for a span outside its row: an answer always follows a prompt.
        """
        import pyarrow.compute as compute

        arrow = dataset.with_format("arrow")
        names = ["row_id", "conversation_id", "spans", "category"]
        columns = arrow.select_columns([n for n in names if n in arrow.column_names])[:].to_pydict()
        lengths = compute.list_value_length(arrow.select_columns(["input_ids"])[:]["input_ids"])
        table = cls(
            lengths=np.asarray(lengths.to_numpy(), dtype=np.int64),
            spans=[[(int(s), int(e)) for s, e in spans] for spans in columns["spans"]],
            row_ids=[str(row_id) for row_id in columns["row_id"]],
            conversation_ids=[str(name) for name in columns["conversation_id"]],
            categories=[str(name or "") for name in columns.get("category", [])],
        )
        for row_id, length, spans in zip(table.row_ids, table.lengths, table.spans, strict=True):
            for s, e in spans:
                if not 1 <= s <= e < length:
                    raise UserError(
                        f"row {row_id}: answer [{s}, {e}] of {length} tokens; wanted 1 <= first <= last < "
                        "length. Run eagle prepare again"
                    )
        return table

    def __len__(self) -> int:
        return len(self.lengths)

    @property
    def num_labels(self) -> np.ndarray:
        """Label positions of each row: one for each answer token. int64 [R]."""
        return np.array([num_labels(spans) for spans in self.spans], dtype=np.int64)

    def fingerprint(self) -> str:
        """16 hex digits; row ids are hashes of content, so they stand for it."""
        return sha256_json([self.row_ids, self.lengths.tolist(), self.spans])[:16]


def num_labels(spans: Sequence[Span]) -> int:
    """Return the number of label positions s-1..e-1 of all spans."""
    return sum(e - s + 1 for s, e in spans)


def label_positions(spans: Sequence[Span]) -> np.ndarray:
    """Return the positions s-1..e-1 of each span, span after span. int64 [m]."""
    pieces = [np.arange(s - 1, e, dtype=np.int64) for s, e in spans]
    return np.concatenate(pieces) if pieces else np.zeros(0, dtype=np.int64)


def default_shard_tokens(tokens: int, batch_tokens: int) -> int:
    """Return tokens per shard: at most 32,768, and small enough that 16 shards can be shared out."""
    return max(batch_tokens, min(_MOST_SHARD_TOKENS, ceil(tokens / _FEWEST_SHARDS)))


def make_batches(lengths: np.ndarray, batch_tokens: int) -> list[tuple[int, ...]]:
    """Cut all rows, longest first, into batches of at most `batch_tokens` tokens, padding included.

    A row longer than that is a batch of its own. Ties keep the order of the rows.
    """
    order = np.argsort(-np.asarray(lengths), kind="stable")
    batches: list[tuple[int, ...]] = []
    at = 0
    while at < len(order):
        count = max(1, batch_tokens // max(1, int(lengths[order[at]])))
        batches.append(tuple(int(row) for row in order[at : at + count]))
        at += count
    return batches


def make_plan(table: RowTable, setting: Setting, groups: Sequence[Sequence[int]] | None = None) -> Plan:
    """Return the plan of all rows of `table`: every row exactly once.

    `groups` are the rows of each shard, where it matters which; else rows of all lengths are in every shard.
    """
    if groups is None:
        batches = make_batches(table.lengths, setting.batch_tokens)
        count = min(len(batches), max(1, ceil(int(table.lengths.sum()) / setting.shard_tokens)))
        dealt = [batches[number::count] for number in range(count)]
    else:
        dealt = [
            [
                tuple(group[i] for i in batch)
                for batch in make_batches(table.lengths[list(group)], setting.batch_tokens)
            ]
            for group in groups
        ]
    return Plan(setting, len(table), tuple(_shard(table, setting, tuple(batches)) for batches in dealt))


def _shard(table: RowTable, setting: Setting, batches: tuple[tuple[int, ...], ...]) -> PlannedShard:
    rows = [row for batch in batches for row in batch]
    tokens, positions = int(table.lengths[rows].sum()), sum(num_labels(table.spans[row]) for row in rows)
    num_spans = sum(len(table.spans[row]) for row in rows)
    shapes = tensor_shapes(setting, len(rows), num_spans, tokens, positions)
    return PlannedShard(batches, tokens, positions, tensor_bytes(shapes))
