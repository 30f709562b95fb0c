"""Prepared rows on disk: a datasets folder and beside it ``rows.json``.

Columns: `row_id` (hash of tokens and spans, then the number of its occurrence), `conversation_id`,
`input_ids` int32, `loss_mask` uint8 (1 on answers and their end-of-turn tokens), `spans` ([first, last]
of each answer, inclusive), `source`; and `category` where some conversation has one, empty for the others.
"""

from __future__ import annotations

import hashlib
from array import array
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from eagle_train.data.encoding import Outcome
from eagle_train.data.mask import EncodedRow
from eagle_train.data.rows_record import check_record, check_totals
from eagle_train.data.token_rows import mask_of
from eagle_train.errors import UserError
from eagle_train.folders import what_is_in
from eagle_train.io.text import read_json

FORMAT_VERSION = 1
_PER_WRITE = 512
_AGAIN = "run eagle prepare again with --overwrite"


@dataclass(frozen=True)
class Rows:
    """A folder of prepared rows. `info` is its ``rows.json``; `dataset` a ``datasets.Dataset``."""

    path: Path
    dataset: Any
    info: dict[str, Any]

    def __len__(self) -> int:
        return int(self.dataset.num_rows)


def open_rows(folder: str | Path) -> Rows:
    """Open what ``eagle prepare`` made. Raises UserError when it is missing, damaged or of another format."""
    import datasets

    path = Path(folder)
    info = read_rows_info(path)
    try:
        dataset = datasets.load_from_disk(str(path))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"{path}: damaged rows ({error}); {_AGAIN}") from error
    if dataset.num_rows != info.get("rows"):
        raise UserError(f"{path}: holds {dataset.num_rows} rows, rows.json says {info['rows']}; {_AGAIN}")
    _check_columns(path, dataset)
    check_totals(dataset, info, path / "rows.json", _AGAIN)
    return Rows(path, dataset, info)


def _check_columns(path: Path, dataset: Any) -> None:
    """Refuse rows that something else wrote: other columns, or spans that are no pairs."""
    import pyarrow.compute as compute

    wanted = _features("category" in dataset.column_names)
    for name, kind in wanted.items():
        found = dataset.features.get(name)
        if found != kind:
            raise UserError(f"{path}: column {name} is {found}, wanted {kind}; {_AGAIN}")
    spans = dataset.with_format("arrow").select_columns(["spans"])[:]["spans"]
    lengths = compute.unique(compute.list_value_length(compute.list_flatten(spans))).to_pylist()
    if set(lengths) - {2}:
        raise UserError(
            f"{path}: column spans holds lists of {lengths} places, wanted [first, last]; {_AGAIN}"
        )


def read_rows_info(path: Path) -> dict[str, Any]:
    """Return ``rows.json`` of a rows folder, checked to be of this format."""
    if path.is_file():
        raise UserError(f"{path}: is a file, wanted a folder of rows; make it with: eagle prepare {path} ...")
    if not (path / "rows.json").exists() and (found := what_is_in(path)):
        raise UserError(f"{path}: {found}, wanted the rows of eagle prepare")
    info = read_json(
        path / "rows.json", "make the rows with: eagle prepare DATA --target T --out " + str(path)
    )
    if info.get("format_version") != FORMAT_VERSION:
        raise UserError(
            f"{path}/rows.json: format {info.get('format_version')}, wanted {FORMAT_VERSION}; {_AGAIN}"
        )
    check_record(info, path / "rows.json", _AGAIN)
    return info


@dataclass
class RowsWritten:
    """What was written. `digest` covers every row id in order: equal digests, equal rows.

    `copies` are rows equal to an earlier one, `dropped` the conversations that were nothing else and for
    that were left out.
    """

    rows: int = 0
    tokens: int = 0
    supervised_tokens: int = 0
    frequencies: Counter[int] = field(default_factory=Counter)
    digest: str = ""
    copies: int = 0
    dropped: int = 0
    categories: Counter[str] = field(default_factory=Counter)  # rows of each, '' for none


def _features(with_category: bool) -> Any:
    import datasets

    optional = {"category": datasets.Value("string")} if with_category else {}
    return datasets.Features(
        row_id=datasets.Value("string"),
        conversation_id=datasets.Value("string"),
        input_ids=datasets.List(datasets.Value("int32")),
        loss_mask=datasets.List(datasets.Value("uint8")),
        spans=datasets.List(datasets.List(datasets.Value("int32"))),
        source=datasets.Value("string"),
        **optional,
    )


def write_dataset(folder: Path, outcomes: Iterable[Outcome], drop_duplicates: bool = False) -> RowsWritten:
    """Write the rows of `outcomes` into the new folder `folder`, streaming; return what they amount to."""
    from datasets.arrow_writer import ArrowWriter

    written, seen, digest = RowsWritten(), Counter[bytes](), hashlib.sha256()
    features = _features(with_category=True)
    raw = folder.with_name(folder.name + ".arrow")
    columns: dict[str, list[Any]] = {name: [] for name in features}
    writer = ArrowWriter(features=features, path=str(raw))
    try:
        for outcome in outcomes:
            rows_before = written.rows
            for row in outcome.rows:
                row_hash = _row_hash(row.input_ids, row.spans)
                row_id = f"{row_hash.hex()}-{seen[row_hash]}"
                written.copies += seen[row_hash] > 0
                seen[row_hash] += 1
                if drop_duplicates and seen[row_hash] > 1:
                    continue
                digest.update(row_id.encode())
                _append(columns, row_id, outcome, row)
                _count(written, row)
                written.categories[outcome.category] += 1
            written.dropped += written.rows == rows_before
            if len(columns["row_id"]) >= _PER_WRITE:
                _flush(writer, columns)
        if columns["row_id"]:
            _flush(writer, columns)
        if written.rows:
            writer.finalize()
    finally:
        writer.close()
    written.digest = digest.hexdigest()
    if written.rows:
        _save(raw, folder, written)
    raw.unlink(missing_ok=True)
    return written


def _row_hash(input_ids: Sequence[int], spans: Sequence[Sequence[int]]) -> bytes:
    parts = array("i", input_ids), array("i", [end for span in spans for end in span])
    return hashlib.sha256(b"|".join(part.tobytes() for part in parts)).digest()[:8]


def is_row(row_id: str, input_ids: Sequence[int], spans: Sequence[Sequence[int]]) -> bool:
    """Return whether tokens and spans are those that the row of this id was written with."""
    return row_id.rpartition("-")[0] == _row_hash(input_ids, spans).hex()


def _append(columns: dict[str, list[Any]], row_id: str, outcome: Outcome, row: EncodedRow) -> None:
    columns["row_id"].append(row_id)
    columns["conversation_id"].append(outcome.conversation_id)
    columns["input_ids"].append(row.input_ids)
    columns["loss_mask"].append(list(mask_of(row.spans, len(row.input_ids))))
    columns["spans"].append([list(span) for span in row.spans])
    columns["source"].append(outcome.source)
    columns["category"].append(outcome.category)


def _count(written: RowsWritten, row: EncodedRow) -> None:
    written.rows += 1
    written.tokens += len(row.input_ids)
    for first, last in row.spans:
        written.supervised_tokens += last + 1 - first
        written.frequencies.update(row.input_ids[first : last + 1])


def _flush(writer: Any, columns: dict[str, list[Any]]) -> None:
    writer.write_batch(columns)
    for values in columns.values():
        values.clear()


def _save(raw: Path, folder: Path, written: RowsWritten) -> None:
    """Lay the Arrow file out as a datasets folder whose bytes depend on the rows alone."""
    import datasets

    dataset = datasets.Dataset.from_file(str(raw))
    if not any(written.categories):
        dataset = dataset.remove_columns("category")
    dataset._fingerprint = written.digest[:16]
    shown = datasets.are_progress_bars_disabled()
    datasets.disable_progress_bars()
    try:
        dataset.save_to_disk(str(folder))
    finally:
        if not shown:
            datasets.enable_progress_bars()
