"""A file that is either whole or not there: write to a temporary name, flush, rename."""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
from collections.abc import Iterator
from pathlib import Path

from eagle_train.io.paths import make_folder, os_error


@contextlib.contextmanager
def replacing(path: str | os.PathLike[str]) -> Iterator[Path]:
    """Yield a temporary name beside `path`; on success flush it to disk and rename it to `path`.

    On any failure the temporary file is removed. Operating-system errors become UserError. It lies in a
    folder of its own, named at random: two writers never meet, on any machine, and what a library leaves
    beside a file that it was killed in is known by its place, ``.NAME.*.tmp``.
    """
    final = Path(path)
    make_folder(final.parent)
    place = temporary_name(final)
    temporary = place / final.name
    try:
        place.mkdir()
        yield temporary
        flush(temporary)
        os.replace(temporary, final)
        flush_folder(final.parent)
    except OSError as error:
        raise os_error(final, error) from error
    finally:
        shutil.rmtree(place, ignore_errors=True)


def sweep(folder: str | os.PathLike[str], name: str = "*") -> None:
    """Remove what killed writers of the file `name`, or of any, left in `folder`."""
    for leftover in Path(folder).glob(f".{name}.*.tmp"):
        if leftover.is_dir():
            shutil.rmtree(leftover, ignore_errors=True)
        else:
            with contextlib.suppress(OSError):
                leftover.unlink(missing_ok=True)


def temporary_name(final: Path) -> Path:
    """Return a name beside `final` that `sweep` knows and no other writer has."""
    return final.with_name(f".{final.name}.{secrets.token_hex(6)}.tmp")


def flush(file: Path) -> None:
    """Return once the file's content is on the disk itself."""
    with open(file, "rb") as handle:
        os.fsync(handle.fileno())


def flush_folder(folder: Path) -> None:
    """Make a rename durable. Some file systems cannot flush a folder: then there is nothing to do."""
    with contextlib.suppress(OSError):
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
