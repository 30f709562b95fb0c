"""The records of one file or dataset, one at a time, each with its place; damage is a record too."""

from __future__ import annotations

import gzip
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from io import BufferedReader
from pathlib import Path
from typing import Any, BinaryIO, cast

from eagle_train.data.conversations import RECORD_FIELDS
from eagle_train.data.json_stream import Damaged, read_lines, read_values
from eagle_train.io.paths import os_error

LINE_FORMS = (".jsonl", ".ndjson", ".jsonl.gz", ".ndjson.gz")
_WRAPPERS = ("data", "train", "rows", "records", "examples")


@dataclass(frozen=True)
class Entry:
    """Record `number` (from 1) of a source, starting at `line`; a `Damaged` value where it cannot be
    read. `read` is how much of `Source.size` had been read by then."""

    number: int
    line: int
    value: Any
    read: int


def dataset_entries(dataset: Any) -> Iterator[Entry]:
    """Yield the rows of a loaded dataset, each as 1,000 of what there is to read."""
    number = 0
    for batch in dataset.with_format("arrow").iter(256):
        for record in batch.to_pylist():
            number += 1
            yield Entry(number, number, record, number * 1000)


def parquet_entries(path: Path, size: int) -> Iterator[Entry]:
    """Yield the rows of a parquet file of `size` bytes; one that cannot be read is the last, as damage."""
    import pyarrow
    import pyarrow.parquet

    number = 0
    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            known = [name for name in file.schema_arrow.names if name in RECORD_FIELDS]
            rows = max(file.metadata.num_rows, 1)
            for batch in file.iter_batches(256, columns=known):
                for record in batch.to_pylist():
                    number += 1
                    yield Entry(number, number, record, size * number // rows)
    except (pyarrow.ArrowException, OSError) as error:
        reason = str(error).strip().splitlines()[0]
        damage = Damaged(f"cannot be read further ({reason})")
        yield Entry(number + 1, number + 1, damage, size)


def json_entries(path: Path) -> Iterator[Entry]:
    """Yield the records of JSON or JSON lines, zipped or not. Raises UserError where it cannot be opened."""
    number = 0
    try:
        with open(path, "rb") as raw:
            zipped = path.name.lower().endswith(".gz")
            # A gzip reader is a buffered binary reader in all but its declared type.
            handle = cast(BufferedReader, gzip.GzipFile(fileobj=raw)) if zipped else raw
            by_line = path.name.lower().endswith(LINE_FORMS) and not _opens_an_array(handle)
            handle.seek(0)
            for line, value in read_lines(handle) if by_line else read_values(handle):
                for item in _unwrapped(value):
                    number += 1
                    yield Entry(number, line, item, _position(raw))
    except OSError as error:
        raise os_error(path, error) from error


def _position(raw: BinaryIO) -> int:
    return os.lseek(raw.fileno(), 0, os.SEEK_CUR)  # tell() is refused while lines are iterated


def _opens_an_array(handle: BufferedReader) -> bool:
    """True when a file called JSON lines is one array over many lines."""
    try:
        first = handle.readline().decode("utf-8", "replace").strip(" \t\r\n\ufeff")
    except (EOFError, OSError):
        return False
    if not first.startswith("["):
        return False
    try:
        json.loads(first)
    except (ValueError, RecursionError):
        return first in ("[", "[{")
    return False


def _unwrapped(value: Any) -> list[Any]:
    """Open what holds several records: ``{"data": [...]}``, or a line that is an array of records."""
    own = (name for name in RECORD_FIELDS if name != "category")  # which may stand over several records
    if isinstance(value, dict) and not any(name in value for name in own):
        inner = next((value[name] for name in _WRAPPERS if isinstance(value.get(name), list)), None)
        return [value] if inner is None else inner
    if (
        isinstance(value, list)
        and value
        and all(isinstance(item, dict) and not _is_turn(item) for item in value)
    ):
        return value
    return [value]


def _is_turn(item: dict[str, Any]) -> bool:
    return "role" in item or "from" in item
