"""``eagle prepare``: parse, then one call."""

from __future__ import annotations

NAME = "prepare"
HELP = "Turn conversations into token rows with a loss mask."
EXAMPLES = ""


def run() -> None:
    raise SystemExit("eagle prepare: being built")
