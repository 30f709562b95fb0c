"""``eagle inspect``: parse, then one call."""

from __future__ import annotations

NAME = "inspect"
HELP = "Show prepared rows with their supervised tokens marked."
EXAMPLES = ""


def run() -> None:
    raise SystemExit("eagle inspect: being built")
