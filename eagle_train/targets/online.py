"""Features straight from the target, whenever rows are read: training without shards.

What shards hold in a codec is had here in the target's own dtype, and a batch of the target holds rows that
are read together, not those of like length in all the data: features equal those of shards up to the codec
and the rounding of sums. A row whose features are not finite is not left out: its step's gradient is not
finite either, and the step is skipped.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from eagle_train import distributed
from eagle_train.io.checksums import sha256_json
from eagle_train.progress import bytes_text, counted
from eagle_train.shards.frozen_target import FrozenTarget
from eagle_train.shards.manifest import described
from eagle_train.shards.plan import Span, make_batches, num_labels
from eagle_train.shards.row_source import RowSource, ShardRow
from eagle_train.shards.schema import Setting, holds_all_last
from eagle_train.targets.batch import BatchFeatures, load_batch, memory_explained, run_batch
from eagle_train.targets.capture import FeatureTap
from eagle_train.targets.check import check_start
from eagle_train.targets.labels import labels
from eagle_train.targets.load import Target, on
from eagle_train.targets.memory import free_memory
from eagle_train.targets.survey import Survey

_SHARE_KEPT = 8  # rows read again and again are kept where they take at most this part of the free memory
# What decides the rows' features but for rounding; all else may change when a run goes on.
_IDENTITY = ("rows_fingerprint", "tokenizer_fingerprint", "features", "layer_ids")


class OnlineRows(RowSource):
    """Prepared rows whose features `target` computes when they are read, `batch_tokens` at a time.

    Features lie where the target leaves them, in its dtype (float32 for fp16). One forward runs at a time.
    """

    def __init__(self, folder: Path, work: Survey, target: Target) -> None:
        identity = target.identity()
        setting = replace(work.plan.setting, target=identity, vocab_size=target.vocab_size)
        self.folder, self.setting = folder, setting
        self.info = {
            "plan": _identity(setting),
            **described(setting),
            "num_rows": len(work.table),
            "skipped": [],
            "shards": [],
            "supervised_frequencies": work.rows_info["supervised_frequencies"],
        }
        self._work, self._target = work, target
        self._kept: dict[int, ShardRow] = {}
        self._to_keep: set[int] = set()
        self._checked = not distributed.is_main()
        self._lock = threading.Lock()
        self._open = ExitStack()
        self._tap = self._open.enter_context(FeatureTap(target, setting.layer_ids))

    @property
    def lengths(self) -> np.ndarray:
        return self._work.table.lengths

    @property
    def spans(self) -> list[list[Span]]:
        return self._work.table.spans

    @property
    def conversation_ids(self) -> list[str]:
        return self._work.table.conversation_ids

    def frozen_target(self) -> FrozenTarget:
        """Return embedding and output map, sharing memory with the target."""
        return self._target.frozen()

    def read_rows(self, rows: Sequence[int]) -> list[ShardRow]:
        """Run the target over `rows`, but for those kept. Raises UserError for what extraction refuses."""
        with self._lock:  # an evaluation may read beside the thread that reads ahead
            wanted = [row for row in dict.fromkeys(rows) if row not in self._kept]
            fresh = dict(zip(wanted, self._run(wanted), strict=True))
            self._kept |= {row: _to_cpu(fresh[row]) for row in wanted if row in self._to_keep}
            return [self._kept.get(row) or fresh[row] for row in rows]

    def keep(self, rows: Sequence[int]) -> str:
        """Keep the features of `rows` in memory once they are computed, where they take little of it."""
        size = sum(self._bytes(row) for row in rows)
        free = free_memory() // distributed.local_world_size()
        mine = size / distributed.world_size()
        self._to_keep = set(rows) if mine <= free / _SHARE_KEPT else set()
        how = "kept in memory" if self._to_keep else "computed at each evaluation"
        text = f"features from {self._target.name} in {self.setting.target['dtype']}, as training goes on"
        return f"{text}; those of {counted(len(rows), 'held-out row')} ({bytes_text(size)}) {how}"

    def close(self) -> None:
        """Take the hooks off the target."""
        with self._lock:
            self._open.close()

    def _bytes(self, row: int) -> int:
        """Bytes of a row's features: tapped layers, last states and labels."""
        setting, tokens = self.setting, int(self.lengths[row])
        found = num_labels(self.spans[row])
        if holds_all_last(setting.features):
            found += tokens
        width = tokens * len(setting.layer_ids) + found
        return width * setting.hidden_size * (2 if self._work.dtype == torch.bfloat16 else 4)

    def _run(self, rows: list[int]) -> list[ShardRow]:
        """Return `rows` in their order; the target runs on those of like length together."""
        found: dict[int, ShardRow] = {}
        work, device = self._work, self._target.device
        batches = make_batches(self.lengths[rows], self.setting.batch_tokens) if rows else []
        with torch.no_grad(), _own_arithmetic(device), on(device):
            for picked in batches:
                batch_rows = [rows[i] for i in picked]
                batch = load_batch(work.dataset, work.table, batch_rows, self._target.vocab_size, device)
                with memory_explained(batch, self.setting, "or put the target elsewhere: --target-device"):
                    features = run_batch(self._tap, batch)
                    if not self._checked:
                        check_start(self._tap, batch, features, work.table, self.setting)
                        self._checked = True
                    ids = batch.padded.flatten()[batch.real]
                    found |= zip(batch_rows, self._cut(batch_rows, ids, features), strict=True)
        return [found[row] for row in rows]

    def _cut(self, rows: list[int], ids: Tensor, features: BatchFeatures) -> list[ShardRow]:
        """Cut a batch, which lies end to end, into its rows."""
        argmax, lse = labels(self._target, features.label_last)
        tokens = [int(self.lengths[row]) for row in rows]
        positions = [num_labels(self.spans[row]) for row in rows]
        every = _wide(features.last) if holds_all_last(self.setting.features) else None
        aux = None if features.aux is None else _wide(features.aux)
        parts = zip(
            rows,
            ids.cpu().split(tokens),
            [None] * len(rows) if aux is None else aux.split(tokens),
            [None] * len(rows) if every is None else every.split(tokens),
            _wide(features.label_last).split(positions),
            argmax.split(positions),
            lse.split(positions),
            strict=True,
        )
        return [ShardRow(x, self.spans[row], *rest) for row, x, *rest in parts]


def _identity(setting: Setting) -> str:
    """Return a text that agrees exactly where rows and features do, save for rounding."""
    known = {name: value for name, value in asdict(setting).items() if name in _IDENTITY}
    target = {name: setting.target[name] for name in ("fingerprint", "dtype")}
    return f"online-{sha256_json([known, target])[:16]}"


def _wide(states: Tensor) -> Tensor:
    """float16 has no autocast beside it in training: widen it, exactly."""
    return states.float() if states.dtype == torch.float16 else states


def _to_cpu(row: ShardRow) -> ShardRow:
    moved: dict[str, Any] = {name: part.cpu() for name, part in vars(row).items() if isinstance(part, Tensor)}
    return replace(row, **moved)


def _own_arithmetic(device: torch.device) -> AbstractContextManager[Any]:
    """Keep training's autocast away from the target.

    Where it is off, as in a thread that reads ahead, nothing is entered: leaving it would clear the casts
    that autocast shares among all threads, and so change how the step that runs meanwhile rounds.
    """
    casting = torch.is_autocast_enabled(device.type)
    return torch.autocast(device.type, enabled=False) if casting else nullcontext()
