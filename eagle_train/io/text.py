"""Text and JSON on disk, as UTF-8."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

from eagle_train.errors import UserError
from eagle_train.io.paths import os_error, refuse_special
from eagle_train.io.whole_file import replacing

_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")


def write_bytes(path: str | os.PathLike[str], content: bytes) -> None:
    """Write `content` to `path`, whole or not at all."""
    with replacing(path) as temporary:
        temporary.write_bytes(content)


def write_text(path: str | os.PathLike[str], content: str) -> None:
    """Write `content` to `path` as UTF-8, whole or not at all. Raises UserError for half a character."""
    write_bytes(path, encoded(path, content))


def encoded(path: str | os.PathLike[str], content: str) -> bytes:
    """Return `content` as UTF-8; raise UserError for half a character in what `path` shall hold."""
    try:
        return content.encode("utf-8")
    except UnicodeEncodeError as error:
        half = error.object[error.start : error.start + 1]
        around = error.object[max(0, error.start - 20) : error.start]
        raise UserError(
            f"{os.fspath(path)}: half a character, {half!r} after {around!r}, cannot be written; correct the "
            "name or setting that it comes from"
        ) from error


def write_json(path: str | os.PathLike[str], value: Any) -> None:
    """Write `value` to `path` as indented JSON, keys in the order given, whole or not at all."""
    write_text(path, json.dumps(value, indent=2, ensure_ascii=False) + "\n")


def read_json(path: str | os.PathLike[str], missing: str) -> dict[str, Any]:
    """Read one JSON object. `missing` says what to do when the file is not there.

    Raises UserError for a missing, unreadable or damaged file, or one with half a character in it.
    """
    file = Path(path)
    try:
        refuse_special(file)
        text = file.read_text(encoding="utf-8")
        value = json.loads(text)
        if _SURROGATE.search(text):  # two of them may be one character
            json.dumps(value, ensure_ascii=False).encode()
    except FileNotFoundError as error:
        raise UserError(f"{file}: not found; {missing}") from error
    except OSError as error:
        raise os_error(file, error) from error
    except RecursionError as error:
        raise UserError(f"{file}: JSON nested too deeply to be read; {missing}") from error
    except UnicodeEncodeError as error:
        raise UserError(
            f"{file}: holds half a character ({error.object[error.start]!r}); {missing}"
        ) from error
    except ValueError as error:
        raise UserError(f"{file}: not valid JSON ({error}); {missing}") from error
    if not isinstance(value, dict):
        raise UserError(f"{file}: holds a JSON {type(value).__name__}, wanted an object; {missing}")
    return value
