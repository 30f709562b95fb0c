"""A folder that is whole or not there, and takes the place of an older one only when it is whole."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

from eagle_train.io import make_folder, os_error


@contextlib.contextmanager
def new_folder(folder: Path) -> Iterator[Path]:
    """Yield the path of a folder to make; on success it takes the place of `folder`, else it is removed."""
    make_folder(folder.parent)
    _remove_stale(folder)
    work = folder.with_name(f".{folder.name}.{os.getpid()}.tmp")
    temporary = work / "rows"
    try:
        make_folder(work)
        yield temporary
        _flush(temporary)
        if folder.exists():
            os.replace(folder, work / "before")
        try:
            os.replace(temporary, folder)
        except BaseException:
            if (work / "before").exists():
                os.replace(work / "before", folder)
            raise
    except OSError as error:
        raise os_error(folder, error) from error
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _remove_stale(folder: Path) -> None:
    """Remove what killed runs left beside `folder`."""
    for left in folder.parent.glob(f".{folder.name}.*.tmp"):
        number = re.fullmatch(re.escape(f".{folder.name}.") + r"(\d+)\.tmp", left.name)
        if number and not _runs(int(number.group(1))):
            shutil.rmtree(left, ignore_errors=True)


def _runs(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def _flush(folder: Path) -> None:
    for path in (*folder.iterdir(), folder):
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
