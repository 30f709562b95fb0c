"""``eagle demo``: parse, then one call."""

from __future__ import annotations

NAME = "demo"
HELP = "Run the whole chain on the built-in small case."
EXAMPLES = ""


def run() -> None:
    raise SystemExit("eagle demo: being built")
