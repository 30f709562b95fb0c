"""What training reads rows from: finished shards, shards that pass by, or the target itself at work."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor

from eagle_train.shards.plan import Span

if TYPE_CHECKING:
    import numpy as np

    from eagle_train.shards.frozen_target import FrozenTarget


@dataclass(frozen=True)
class ShardRow:
    """One document with its features. L tokens, m label positions s-1..e-1 of its spans, in order."""

    input_ids: Tensor  # (L,) int64
    spans: list[Span]  # answers, [first, last] inclusive
    aux: Tensor | None  # (L, 3H) aux[t]: having read token t
    last_all: Tensor | None  # (L, H) final state after the norm, of every token
    label_last: Tensor  # (m, H) final state after the norm, at label positions; (m, 0) with top labels
    label_argmax: Tensor  # (m,) int64 the target's most likely token over its whole vocabulary
    label_lse: Tensor  # (m,) float32 log-sum-exp of the target's logits over its whole vocabulary
    label_ids: Tensor | None = None  # (m, k) int32 the likeliest tokens, in place of label_last
    label_logp: Tensor | None = None  # (m, k) their log-probabilities over the whole vocabulary


class RowSource(ABC):
    """Rows with features, numbered 0..num_rows-1 in the order they were prepared."""

    folder: Path  # of the shards, or of the rows where there are none; for messages and records
    info: dict[str, Any]  # as the manifest of a shard directory has it

    @property
    @abstractmethod
    def lengths(self) -> np.ndarray:
        """Tokens of each row, int64 [R]."""

    @property
    @abstractmethod
    def spans(self) -> list[list[Span]]:
        """Answers of each row as (first, last), inclusive."""

    @property
    @abstractmethod
    def conversation_ids(self) -> list[str]:
        """The conversation that each row comes from."""

    @abstractmethod
    def frozen_target(self) -> FrozenTarget:
        """Return the target's embedding and output map."""

    @abstractmethod
    def read_rows(self, rows: Sequence[int]) -> list[ShardRow]:
        """Return these rows with their features, in this order; any thread may ask."""

    @cached_property
    def supervised_frequencies(self) -> dict[int, int]:
        """How often each token id is supervised."""
        return {int(token): count for token, count in self.info["supervised_frequencies"].items()}

    def verify_rows(self, rows: Sequence[int]) -> None:  # noqa: B027
        """Verify this process's share of what `rows` are read from. Raises UserError."""

    def keep(self, rows: Sequence[int]) -> str:
        """Take note that `rows` will be read again and again; return how features are had, '' from disk."""
        return ""

    def read_past(self, step: int) -> None:  # noqa: B027
        """Take note that this process has read all training rows of the first `step` steps."""

    def trained_past(self, step: int) -> None:  # noqa: B027
        """Take note that all processes have trained the first `step` steps."""

    def close(self) -> None:  # noqa: B027
        """Let go of what reading holds; whoever waits for a row gets a UserError."""
