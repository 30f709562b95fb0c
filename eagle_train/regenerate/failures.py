"""Answers that could not be made: noted, counted, and bounded."""

from __future__ import annotations

from pathlib import Path

from eagle_train.errors import UserError
from eagle_train.progress import counted
from eagle_train.regenerate.answers import Asked
from eagle_train.regenerate.work import Work


class Failures:
    """Failures of this run; one more than `limit` stops it."""

    def __init__(self, work: Work, out: Path, limit: int) -> None:
        self._work, self._out, self._limit = work, out, limit
        self.count = 0

    def add(self, asked: Asked, turn: int, reason: str) -> None:
        """Note a failed answer. Raises UserError when it is one too many."""
        self._work.fail((asked.row_id, turn), reason)
        self.count += 1
        if self.count > self._limit:
            raise UserError(
                f"{self._out}: {counted(self.count, 'answer')} failed, more than --max-failures "
                f"{self._limit}; the "
                f"last, {asked.conversation.source}, turn {turn + 1}: {reason}. Finished answers are kept: "
                "mend the cause and give the same command again"
            )
