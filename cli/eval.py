"""``eagle eval``: parse, then one call."""

from __future__ import annotations

NAME = "eval"
HELP = "Decode with a head: acceptance length, speed-up, losslessness."
EXAMPLES = ""


def run() -> None:
    raise SystemExit("eagle eval: being built")
