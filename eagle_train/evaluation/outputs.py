"""Whether a file of figures can be written, and what it would replace: asked before the hours they take."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from pathlib import Path

from eagle_train.errors import UserError


def check_output(option: str, path: str | os.PathLike[str]) -> None:
    """Raise UserError, naming `option`, where `path` could not be written as a file.

    A folder is made and removed in the nearest folder that exists, so that permissions, full disks, read-only
    file systems and too long names are seen; nothing stays behind.
    """
    final = Path(path)
    try:
        if final.is_dir() or os.fspath(path).endswith(("/", os.sep)):
            raise UserError(f"{option} {path}: is a folder; give {option} the name of a file")
        place = final.parent
        while not place.exists() and place != place.parent:
            place = place.parent
        if not place.is_dir():
            raise UserError(f"{option} {path}: {place} is a file, wanted a folder; choose another {option}")
        with tempfile.TemporaryDirectory(prefix=f".{final.name}.", suffix="-try.tmp", dir=place):
            pass
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise UserError(f"{option} {path}: cannot be written ({reason}); choose another {option}") from error


def refuse_foreign(
    option: str, path: str | os.PathLike[str], is_earlier: Callable[[Path], bool], what: str
) -> None:
    """Raise UserError, naming `option`, where `path` is there and is not an earlier `what`, which may go."""
    file = Path(path)
    if file.exists() and not (file.is_file() and is_earlier(file)):
        raise UserError(
            f"{option} {path}: there is a file that is no {what}, wanted a new name or that of an earlier "
            f"one; choose another {option}"
        )
