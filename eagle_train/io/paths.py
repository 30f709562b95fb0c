"""Paths that cannot be used, as sentences."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

from eagle_train.errors import UserError

_ADVICE = {
    errno.ENOSPC: "the disk is full; free some room and run the same command again",
    errno.EDQUOT: "the disk quota is used up; free some room and run the same command again",
    errno.EACCES: "no permission; choose another --out or change the folder's owner",
    errno.EPERM: "not permitted; choose another --out",
    errno.EROFS: "the file system is read-only; choose another --out",
    errno.ENOTDIR: "a part of the path is a file; choose another --out",
    errno.EISDIR: "the path is a folder; choose another name",
    errno.EFBIG: "the file system or the process limit does not allow a file of that size",
    errno.EEXIST: "a file of that name is in the way; choose another --out",
    errno.ENAMETOOLONG: "the name is too long; choose a shorter --out",
}


def os_error(path: str | os.PathLike[str], error: OSError) -> UserError:
    """Turn an operating-system error about `path` into the sentence a user reads."""
    advice = _ADVICE.get(error.errno or 0, "check the path")
    reason = error.strerror or str(error)
    return UserError(f"{os.fspath(path)}: {reason} ({advice})")


def refuse_special(path: str | os.PathLike[str]) -> None:
    """Raise UserError for a pipe, a socket or a device: opening one may wait for ever.

    Whatever else is wrong with the path, opening it says.
    """
    try:
        mode = os.stat(path).st_mode
    except OSError:
        return
    if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
        raise UserError(
            f"{os.fspath(path)}: a pipe, a socket or a device, wanted a file; put the file in its place"
        )


def make_folder(path: str | os.PathLike[str]) -> Path:
    """Create the folder `path` with its parents; raise UserError where that cannot be done."""
    folder = Path(path)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise os_error(folder, error) from error
    return folder
