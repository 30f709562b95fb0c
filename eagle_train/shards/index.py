"""Checking the index over all shards, so that no reader meets an edited one."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

_WHOLE = {"shard": 1, "slot": 1, "lengths": 1, "span_starts": 1, "spans": 2}  # int64, of so many dimensions
_TEXTS = ("row_ids", "conversation_ids", "categories")


class WrongIndex(ValueError):
    """Which tensor is not what it must be, and what was wanted."""


def check_index(index: Mapping[str, Tensor], entries: Sequence[Mapping[str, Any]]) -> None:
    """Raise WrongIndex unless `index` can be one of shards of these manifest `entries`.

    R rows, S spans: shard, slot, lengths int64 [R]; span_starts int64 [R+1]; spans int64 [S, 2]; texts as
    uint8, a JSON list of R. Every row lies in a place of its own, every span after its row's first token.
    """
    for name, num_dims in _WHOLE.items():
        _want(name in index, name, "it there")
        tensor = index[name]
        _want(
            tensor.dtype == torch.int64 and tensor.dim() == num_dims, name, f"int64 of {num_dims} dimensions"
        )
    num_rows = sum(entry["rows"] for entry in entries)
    for name in ("shard", "slot", "lengths"):
        _want(len(index[name]) == num_rows, name, f"{num_rows} rows, as shards.json says")
    _check_places(index, entries)
    _check_spans(index)
    for name in _TEXTS:
        _want(name in index or name == "categories", name, "it there")
        if name in index:
            _want(_are_texts(index[name], num_rows), name, f"a JSON list of {num_rows} texts")


def _check_places(index: Mapping[str, Tensor], entries: Sequence[Mapping[str, Any]]) -> None:
    shard, slot, num_shards = index["shard"], index["slot"], len(entries)
    _want(bool(((shard >= 0) & (shard < num_shards)).all()), "shard", f"numbers below {num_shards}")
    rows = torch.tensor([entry["rows"] for entry in entries], dtype=torch.int64)
    _want(bool(((slot >= 0) & (slot < rows[shard])).all()), "slot", "places below the rows of their shards")
    firsts = rows.cumsum(0) - rows
    _want(len((firsts[shard] + slot).unique()) == len(slot), "slot", "every place of a shard once")
    _want(bool((index["lengths"] >= 0).all()), "lengths", "numbers of tokens")
    tokens = torch.zeros(num_shards, dtype=torch.int64).index_add_(0, shard, index["lengths"])
    _want(tokens.tolist() == [entry["tokens"] for entry in entries], "lengths", "the tokens of each shard")


def _check_spans(index: Mapping[str, Tensor]) -> None:
    lengths, starts, spans = index["lengths"], index["span_starts"], index["spans"]
    counts = starts.diff()
    fits = len(starts) == len(lengths) + 1 and int(starts[0]) == 0 and int(starts[-1]) == len(spans)
    _want(fits and bool((counts >= 0).all()), "span_starts", "one start a row, from 0 up to the spans")
    _want(spans.shape[1] == 2, "spans", "first and last token of each")
    first, last = spans.unbind(1)
    inside = (first >= 1) & (first <= last) & (last < lengths.repeat_interleave(counts))
    _want(bool(inside.all()), "spans", "each inside its row, after the first token")


def _are_texts(encoded: Tensor, count: int) -> bool:
    if encoded.dtype != torch.uint8 or encoded.dim() != 1:
        return False
    try:
        texts = json.loads(encoded.numpy().tobytes())
        if not isinstance(texts, list) or len(texts) != count:
            return False
        "".join(texts).encode()  # half characters cannot be written again
    except (ValueError, TypeError, RecursionError):
        return False
    return True


def _want(met: bool, name: str, words: str) -> None:
    if not met:
        raise WrongIndex(f"{name}: wanted {words}")
