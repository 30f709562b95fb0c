"""``eagle report``: parse, then one call."""

from __future__ import annotations

import json
from pathlib import Path

import typer

from . import options

NAME = "report"
HELP = "Draw a run's course: loss, acceptance length, learning rate, speed, as one HTML page."
EXAMPLES = """
**Examples**

    eagle report run/

    eagle report run/ --json

    eagle train shards/ --recipe eagle3 --out run/ && eagle report run/
"""


def run(
    folder: Path = typer.Argument(..., metavar="RUN", help="The --out of eagle train, finished or not."),
    as_json: options.AsJson = False,
) -> None:
    from eagle_train.training.page import write_page

    page = write_page(folder)
    print(json.dumps({"page": str(page)}) if as_json else f"{page}: open it in a browser")
