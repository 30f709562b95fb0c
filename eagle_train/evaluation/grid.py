"""One comparison for every question set at every temperature, with the target loaded once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from eagle_train.decoding.sampling import Sampling
from eagle_train.errors import UserError
from eagle_train.evaluation.evaluate import evaluate
from eagle_train.evaluation.outputs import check_output, refuse_foreign
from eagle_train.evaluation.page import TITLE, as_page, predicted_page
from eagle_train.evaluation.questions import read_questions
from eagle_train.evaluation.tables import as_csv
from eagle_train.io.paths import os_error
from eagle_train.io.text import read_json, write_json, write_text
from eagle_train.targets.load import Target, load_target

FORMATS = (".json", ".csv", ".html")
_START = 4096  # characters, which hold a table's header and a page's title


def evaluate_grid(
    head: str | None,
    target: str,
    sets: Sequence[str],
    temperatures: Sequence[float],
    *,
    sampling: Sampling,
    num_questions: int | None = None,
    dtype: str = "auto",
    trust_remote_code: bool = False,
    device_map: str | None = None,
    **settings: Any,
) -> list[dict[str, Any]]:
    """Return the report of `evaluate` for each set and temperature, ``set`` added: the set's name.

    No set means the built-in one; other settings are those of `evaluate`. Everything is read before any
    decoding, so that a wrong name costs no time.
    """
    questions = {name: read_questions(name or None, num_questions) for name in sets or ("",)}
    laws = [replace(sampling, temperature=temperature) for temperature in temperatures or (0.0,)]
    model: Target = load_target(
        target, dtype=dtype, trust_remote_code=trust_remote_code, device_map=device_map
    )
    return [
        {"set": Path(name).stem if name else None, **evaluate(head, model, some, sampling=law, **settings)}
        for name, some in questions.items()
        for law in laws
    ]


def check_reports(paths: Sequence[str]) -> None:
    """Raise UserError for a report file whose ending names no format, or that cannot be written.

    An earlier report may be replaced; a file that is anything else, such as shards' own record, may not.
    """
    for path in paths:
        if Path(path).suffix not in FORMATS:
            raise UserError(f"--report {path}: wanted a file ending in {', '.join(FORMATS)}")
        check_output("--report", path)
        refuse_foreign("--report", path, _is_report, "report of eagle eval")


def _is_report(file: Path) -> bool:
    """Return whether `file` holds what `write_reports` or ``--json`` gives, in the format of its ending."""
    if file.suffix == ".json":
        try:
            value = read_json(file, "")
        except UserError:
            return False
        reports = value.get("reports", [value])
        return isinstance(reports, list) and bool(reports) and all(map(_has_figures, reports))
    try:
        with file.open(encoding="utf-8-sig", errors="replace") as text:
            start = text.read(_START)
    except OSError as error:
        raise os_error(file, error) from error
    if file.suffix == ".csv":
        return start.split("\n")[0] == as_csv([]).rstrip()
    return start.startswith("<!doctype html>") and f"<title>{TITLE}" in start


def _has_figures(report: Any) -> bool:
    return (
        isinstance(report, dict)
        and {"target", "temperature"} <= set(report)
        and ("results" in report or "predicted" in report)
    )


def write_reports(paths: Sequence[str], reports: Sequence[dict[str, Any]]) -> None:
    """Write the reports of `evaluate`, or one of `predict`, in the format that each file's ending names."""
    check_reports(paths)
    for path in paths:
        if Path(path).suffix == ".json":
            write_json(path, {"reports": list(reports)})
        elif Path(path).suffix == ".csv":
            write_text(path, as_csv(reports))
        else:
            write_text(path, predicted_page(reports[0]) if "predicted" in reports[0] else as_page(reports))
