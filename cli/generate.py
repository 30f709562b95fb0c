"""``eagle generate``: parse, then one call."""

from __future__ import annotations

NAME = "generate"
HELP = "Answer one prompt live, accepted guesses coloured."
EXAMPLES = ""


def run() -> None:
    raise SystemExit("eagle generate: being built")
