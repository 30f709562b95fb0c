"""A folder made whole or not at all, that replaces only what costs the user nothing."""

from __future__ import annotations

import contextlib
from collections.abc import Collection
from pathlib import Path

from eagle_train.errors import UserError
from eagle_train.io.text import read_json
from eagle_train.training.trained_on import PROVENANCE


def made_by(folder: Path) -> str | None:
    """Return the command that wrote the folder, None where its provenance.json names none."""
    if not (folder / PROVENANCE).is_file():
        return None
    with contextlib.suppress(UserError):
        return read_json(folder / PROVENANCE, "").get("made_by")
    return None


def check_free(
    final: Path, command: str, files: Collection[str], kept: Collection[Path], overwrite: bool
) -> None:
    """Refuse an `--out` whose replacement would cost the user something.

    `command` made earlier folders of this kind, which hold `files` and nothing else; `kept` are folders that
    must not go with it. Raises UserError.
    """
    if not final.exists() and not final.is_symlink():
        return
    if not final.is_dir():
        raise UserError(f"{final}: is a file; choose another --out")
    resolved, what = final.resolve(), command.removeprefix("eagle ")
    for folder in (*kept, Path.cwd(), Path.home()):
        if folder == resolved or resolved in folder.parents:
            raise UserError(
                f"{final}: holds {folder}, which an {what} must not replace; choose another --out"
            )
    held = sorted(entry.name for entry in final.iterdir())
    if overwrite or not held:
        return
    if made_by(final) != command:
        raise UserError(f"{final}: exists and is no earlier {what}; choose another --out, or --overwrite it")
    if foreign := [name for name in held if name not in files]:
        raise UserError(
            f"{final}: this earlier {what} also holds {foreign[0]}, which would be lost; "
            "choose another --out, or --overwrite it"
        )


def folder_bytes(folder: Path) -> int:
    """Return the size of all files in a folder."""
    return sum(entry.stat().st_size for entry in folder.rglob("*") if entry.is_file())
