"""``eagle train``: parse, then one call."""

from __future__ import annotations

NAME = "train"
HELP = "Train a draft head on shards."
EXAMPLES = ""


def run() -> None:
    raise SystemExit("eagle train: being built")
