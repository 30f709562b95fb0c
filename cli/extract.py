"""``eagle extract``: parse, then one call."""

from __future__ import annotations

NAME = "extract"
HELP = "Run the frozen target once and keep its features in shards."
EXAMPLES = ""


def run() -> None:
    raise SystemExit("eagle extract: being built")
