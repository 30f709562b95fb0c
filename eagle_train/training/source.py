"""Where the rows of a run come from: a folder of shards, or prepared rows and the target itself."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from eagle_train.config import Recipe
from eagle_train.errors import UserError
from eagle_train.shards.reader import open_shards
from eagle_train.shards.row_source import RowSource
from eagle_train.shards.schema import MANIFEST
from eagle_train.targets.load import load_target, pick_device
from eagle_train.targets.online import OnlineRows
from eagle_train.targets.survey import survey
from eagle_train.training.build import check_labels, check_shards
from eagle_train.training.passing import open_passing
from eagle_train.training.processes import Processes
from eagle_train.training.run_folder import STREAM


@dataclass(frozen=True)
class LiveTarget:
    """The frozen target at work beside training, on prepared rows."""

    name: str  # hub id, directory or .gguf file
    dtype: str = "auto"
    device: str | None = None  # None: that of training
    batch_tokens: int | None = None  # tokens of one forward, padding included; None as for extraction
    trust_remote_code: bool = False
    max_disk: int | None = None  # bytes of shards that pass by; None: features never touch the disk
    codec: str = "bf16"  # of those shards
    label_top_k: int = 0  # likeliest tokens of each label in those shards, in place of its state

    def settings(self, recipe: Recipe, device: torch.device) -> dict[str, Any]:
        """Return what a survey of the rows takes."""
        kind = recipe.head.kind
        return {
            "features": kind,
            "layer_ids": (recipe.head.layer_ids or None) if kind == "eagle3" else None,
            "dtype": self.dtype,
            "device": self.device or str(device),
            "batch_tokens": self.batch_tokens,
            "trust_remote_code": self.trust_remote_code,
        }


def open_source(
    place: Path,
    recipe: Recipe,
    processes: Processes,
    dtype: torch.dtype,
    live: LiveTarget | None,
    out: Path,
    done: int,
) -> RowSource:
    """Open shards, or rows whose features `live` computes when they are read, or just before into `out`.

    The run in `out` stands after `done` steps. 8-bit states are decoded to `dtype`. Raises UserError where
    shards do not hold what the recipe's head reads.
    """
    if live is None:
        shards = open_shards(place, rank=processes.rank, world=processes.world, dtype=dtype)
        check_shards(recipe, shards)
        return shards
    refuse_shards(place)
    check_labels(recipe, live.label_top_k, f"--label-top-k {live.label_top_k}")
    pick_device(live.device, "--target-device")  # before anything else names it otherwise
    if live.max_disk is not None:
        return open_passing(place, recipe, processes, dtype, live, out / STREAM, done)
    settings = live.settings(recipe, processes.device)
    work = survey(place, live.name, None, **settings)
    target = load_target(
        live.name, dtype=work.dtype, device=work.device, trust_remote_code=live.trust_remote_code
    )
    return OnlineRows(place, work, target)


def refuse_shards(place: Path) -> None:
    """Raise UserError where `place` holds shards: their features are made already."""
    if (place / MANIFEST).is_file():
        raise UserError(
            f"{place}: holds shards, wanted the rows that eagle prepare made; to train on these shards leave "
            "--online, --max-disk and --target out"
        )
