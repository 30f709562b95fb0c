"""A file that exactly one of many writers makes."""

from __future__ import annotations

import contextlib
import errno
import os
from pathlib import Path

from eagle_train.io.paths import make_folder, os_error
from eagle_train.io.text import encoded
from eagle_train.io.whole_file import flush_folder, temporary_name


def create_text(path: str | os.PathLike[str], content: str) -> bool:
    """Write `content` to `path`, whole, unless a file of that name is there: then return False.

    Of several writers at the same moment exactly one gets True. Raises UserError where it cannot write.
    """
    final = Path(path)
    make_folder(final.parent)
    temporary = temporary_name(final)
    try:
        with open(temporary, "xb") as handle:
            handle.write(encoded(path, content))
            handle.flush()
            os.fsync(handle.fileno())
        link(temporary, final)
        flush_folder(final.parent)
    except FileExistsError:
        return False
    except OSError as error:
        raise os_error(final, error) from error
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
    return True


def link(temporary: Path, final: Path) -> None:
    """Give `temporary` the name `final` too; raises FileExistsError where a rename would replace a file."""
    try:
        os.link(temporary, final)
    except OSError as error:
        if error.errno not in (errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS):
            raise
        with open(final, "xb") as handle:  # a file system without links
            handle.write(temporary.read_bytes())
