"""A folder that is either whole or not there, and takes the place of an earlier one only when whole."""

from __future__ import annotations

import contextlib
import glob
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from eagle_train.io.paths import make_folder, os_error
from eagle_train.io.whole_file import flush, flush_folder

_BEFORE = "before"


@contextlib.contextmanager
def replacing_folder(path: str | os.PathLike[str]) -> Iterator[Path]:
    """Yield a new empty folder; on success flush it to disk and give it the name `path`.

    An earlier folder of that name goes only once the new one has taken its place; on any failure it is as
    it was. It lies in a place named after this process, ``.NAME.PROCESS.tmp``; those of processes that run
    no more are cleared away first. Operating-system errors become UserError.
    """
    final = Path(path)
    make_folder(final.parent)
    place = final.with_name(f".{final.name}.{os.getpid()}.tmp")
    fresh = place / "new"
    try:
        for left in final.parent.glob(f".{glob.escape(final.name)}.*.tmp"):
            number = left.name.removeprefix(f".{final.name}.").removesuffix(".tmp")
            if number.isdecimal() and (int(number) == os.getpid() or not is_running(int(number))):
                _clear(left, final)
        try:
            fresh.mkdir(parents=True)
            yield fresh
            for file in fresh.rglob("*"):
                if file.is_file():
                    flush(file)
            flush_folder(fresh)
            if final.exists():
                os.replace(final, place / _BEFORE)
            os.replace(fresh, final)
            flush_folder(final.parent)
        finally:
            _clear(place, final)
    except OSError as error:
        raise os_error(final, error) from error


def _clear(place: Path, final: Path) -> None:
    """Remove a writer's place; an earlier folder that was moved there goes back where none followed it."""
    if (place / _BEFORE).exists() and not final.exists():
        os.replace(place / _BEFORE, final)
    shutil.rmtree(place, ignore_errors=True)


def is_running(process: int) -> bool:
    """Return whether this machine runs a process of that number, whoever's it is."""
    try:
        os.kill(process, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:
        return True
    return True
