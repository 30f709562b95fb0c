"""Several evaluations as one table: methods by question sets, for people and for spreadsheets."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from typing import Any

from eagle_train.evaluation.report import draft_name, short_sources, way_name

_NAMES = "set temperature method source draft lossless tau rounds tokens round_cost"
_RATES = "tokens_per_second plain_tokens_per_second speedup speedup_with_prefill"
_COLUMNS = (*_NAMES.split(), *_RATES.split())


def rows(reports: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return one flat dict per report of `evaluate` and way of decoding, plain decoding included.

    A report of `predict` gives one, without speeds.
    """
    found = []
    for report in reports:
        if report.get("predicted"):
            named = {"set": report["texts"], "method": report["kind"], "source": report["head"]}
            own = {name: report.get(name) for name in _COLUMNS}
            found.append({**own, **named, "draft": draft_name(report["tree"])})
            continue
        where = {"set": set_name(report), "temperature": report["temperature"]}
        rate = report["plain"]["tokens_per_second"]
        alone = {"tau": 1.0, "speedup": 1.0, "tokens_per_second": rate, "plain_tokens_per_second": rate}
        found.append({**dict.fromkeys(_COLUMNS), **where, "method": "plain", **alone})
        for result in report["results"]:
            own = {name: result.get(name) for name in _COLUMNS}
            found.append({**own, **where, "draft": draft_name(result["tree"])})
    return found


def set_name(report: dict[str, Any]) -> str:
    """Name a report's question set as the user did."""
    return str(report.get("set") or "built-in")


def as_csv(reports: Sequence[dict[str, Any]]) -> str:
    """Return `rows` as CSV with a header."""
    text = io.StringIO()
    writer = csv.DictWriter(text, _COLUMNS, lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows(reports))
    return text.getvalue()


def as_lines(reports: Sequence[dict[str, Any]]) -> list[str]:
    """Return a line for each way of decoding, with tau and speed-up on each set at each temperature."""
    heads, table = cells(reports)
    lines = [["", *heads], *([name, *values] for name, values in table.items())]
    widths = [max(len(line[i]) for line in lines) for i in range(len(lines[0]))]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in lines
    ]


def cells(reports: Sequence[dict[str, Any]]) -> tuple[list[str], dict[str, list[str]]]:
    """Return the columns' names and, by way of decoding, ``tau, speed-up`` in each column."""
    heads = [f"{set_name(report)}, T={report['temperature']:g}" for report in reports]
    sources = short_sources([result for report in reports for result in report["results"]])
    table: dict[str, list[str]] = {"plain": ["1.00, 1.00x"] * len(reports)}
    for column, report in enumerate(reports):
        for result in report["results"]:
            values = table.setdefault(way_name(result, sources), ["-"] * len(reports))
            values[column] = f"{result['tau']:.2f}, {result['speedup']:.2f}x"
    return heads, table
