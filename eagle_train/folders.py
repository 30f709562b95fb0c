"""What a folder holds, told by the records that this project leaves in it."""

from __future__ import annotations

import os
from pathlib import Path

from eagle_train.errors import UserError
from eagle_train.io.text import read_json

_MARKS = {
    "rows.json": "rows of eagle prepare",
    "shards.json": "shards of eagle extract",
    "plan.json": "shards of eagle extract, not finished",
    "run.json": "a run of eagle train",
}


def what_is_in(folder: str | os.PathLike[str]) -> str:
    """Name what this project made in `folder`; empty for anything else."""
    path = Path(folder)
    for mark, name in _MARKS.items():
        if (path / mark).is_file():
            return name
    if (path / "config.json").is_file():
        try:
            return "a draft head" if "eagle_train" in read_json(path / "config.json", "") else ""
        except UserError:
            return ""
    return ""


def refuse_as_target(target: str) -> None:
    """Raise UserError for a folder that holds something else of this project, such as the draft head."""
    if found := what_is_in(target):
        raise UserError(
            f"{target}: {found}, wanted the target: a hub id, a model's directory or a .gguf file; were two "
            "arguments exchanged?"
        )
