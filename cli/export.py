"""``eagle export``: parse, then one call."""

from __future__ import annotations

NAME = "export"
HELP = "Write the directory that a serving engine loads."
EXAMPLES = ""


def run() -> None:
    raise SystemExit("eagle export: being built")
