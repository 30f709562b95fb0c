"""What other workers finish meanwhile, for one progress bar over all."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from pathlib import Path

from eagle_train.shards.schema import Plan, shard_name

_SECONDS_BETWEEN_LOOKS = 2.0


class Peers:
    """Counts the tokens of shards that appear in `folder` by other hands."""

    def __init__(self, folder: Path, plan: Plan, missing: Sequence[int]) -> None:
        self._folder = folder
        there = set(os.listdir(folder))  # a foreign one among them is yet to be replaced
        self._left = {shard_name(n): plan.shards[n].tokens for n in missing if shard_name(n) not in there}
        self._looked = time.monotonic()

    def forget(self, number: int) -> None:
        """Leave out a shard that this worker makes."""
        self._left.pop(shard_name(number), None)

    def newly_done(self, now: bool = False) -> int:
        """Return the tokens finished by others since the last look; looks every two seconds, or `now`."""
        if not self._left or not (now or time.monotonic() - self._looked > _SECONDS_BETWEEN_LOOKS):
            return 0
        self._looked = time.monotonic()
        return sum(self._left.pop(name, 0) for name in os.listdir(self._folder))
