"""One planned batch through the target: padded on the right for the forward, flat afterwards."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from eagle_train.data.rows import is_row
from eagle_train.errors import UserError
from eagle_train.shards.plan import RowTable, label_positions
from eagle_train.shards.schema import Setting, holds_all_last
from eagle_train.shards.writer import ShardBuffer
from eagle_train.targets.capture import FeatureTap
from eagle_train.targets.labels import labels, top_labels


@dataclass(frozen=True)
class RowBatch:
    """B rows of tokens; n real tokens, m label positions in all."""

    rows: tuple[int, ...]
    padded: Tensor  # (B, T) int64, zeros on the right
    real: Tensor  # (n,) int64, where the real tokens lie in the flattened (B * T)
    label_at: Tensor  # (m,) int64, where the label positions lie among the n real tokens
    lengths: list[int]


@dataclass(frozen=True)
class BatchFeatures:
    """What one forward leaves of a batch, flat and without padding, in the target's dtype."""

    aux: Tensor | None  # (n, len(layer_ids) * H)
    last: Tensor  # (n, H) after the final norm
    label_last: Tensor  # (m, H)
    witness: Tensor  # (n,) float32, finite exactly where all features of the token are


def load_batch(
    dataset: Any, table: RowTable, rows: Sequence[int], vocab_size: int, device: torch.device
) -> RowBatch:
    """Read the tokens of `rows`; raise UserError naming a damaged row, or a token outside the vocabulary."""
    lengths = [int(table.lengths[row]) for row in rows]
    width = max(lengths)
    padded = np.zeros((len(rows), width), dtype=np.int64)
    real, label_at = [], []
    for i, (row, length) in enumerate(zip(rows, lengths, strict=True)):
        tokens = dataset[int(row)]["input_ids"]
        if not is_row(table.row_ids[row], tokens, table.spans[row]):
            raise UserError(
                f"row {table.row_ids[row]}: its tokens or answers are no longer those that were prepared; "
                "the rows are damaged, run eagle prepare again with --overwrite"
            )
        ids = np.asarray(tokens, dtype=np.int64)
        if ids.max() >= vocab_size or ids.min() < 0:
            raise UserError(
                f"row {table.row_ids[row]}: token {int(ids.max())} outside the target's vocabulary of "
                f"{vocab_size}; the rows were prepared for another target: run eagle prepare again"
            )
        padded[i, :length] = ids
        real.append(np.arange(i * width, i * width + length))
        label_at.append(sum(lengths[:i]) + label_positions(table.spans[row]))
    return RowBatch(
        tuple(rows),
        torch.from_numpy(padded).to(device),
        torch.from_numpy(np.concatenate(real)).to(device),
        torch.from_numpy(np.concatenate(label_at)).to(device),
        lengths,
    )


def run_batch(tap: FeatureTap, batch: RowBatch) -> BatchFeatures:
    """Run the target's body once and keep the real tokens' features.

    No mask is needed: attention is causal, so padding on the right is never seen by a real token.
    """
    captured = tap.forward(batch.padded)
    place = captured.last.device  # of the last layer; the batch lies where the first is
    real, label_at = batch.real.to(place), batch.label_at.to(place)
    last = captured.last.flatten(0, 1)[real]  # (B, T, H) -> (n, H)
    aux = None if captured.aux is None else captured.aux.flatten(0, 1)[real]
    witness = last.sum(-1, dtype=torch.float32)
    if aux is not None:
        witness = witness + aux.sum(-1, dtype=torch.float32)
    return BatchFeatures(aux, last, last[label_at], witness)


def store_batch(
    tap: FeatureTap, batch: RowBatch, features: BatchFeatures, buffer: ShardBuffer, setting: Setting
) -> None:
    """Label the batch and append it to the shard, encoded."""
    kept: Tensor | None = features.last if holds_all_last(setting.features) else features.label_last
    top: tuple[Tensor, Tensor] | None = None
    with torch.no_grad():
        if setting.label_top_k:
            argmax, lse, ids, logp = top_labels(tap.target, features.label_last, setting.label_top_k)
            kept, top = None, (ids.to(torch.int32), logp)
        else:
            argmax, lse = labels(tap.target, features.label_last)
    buffer.put(
        input_ids=batch.padded.flatten()[batch.real].to(torch.int32),
        aux=features.aux,
        last=kept,
        label_argmax=argmax.to(torch.int32),
        label_lse=lse,
        witness=features.witness,
        top=top,
    )


@contextmanager
def memory_explained(batch: RowBatch, setting: Setting, advice: str) -> Iterator[None]:
    """Turn a device that is out of memory into a UserError that says what to change, ending in `advice`."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise UserError(
            f"{setting.device}: out of memory at a batch of {batch.padded.numel():,} tokens in "
            f"{len(batch.rows)} rows; give --batch-tokens below {setting.batch_tokens:,} {advice}"
        ) from error
