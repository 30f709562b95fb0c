"""``eagle inspect``: parse, then one call."""

from __future__ import annotations

import json
import sys

import typer

from . import options

NAME = "inspect"
HELP = "Show prepared rows with their supervised tokens marked."
EXAMPLES = """
**Examples**

    eagle inspect rows/ --row 0

    eagle inspect rows/ --row 12 --tokens

    eagle inspect rows/ --row 0 --json
"""

_SUPERVISED = "supervised, the answers with their end-of-turn token (one cut at its token limit has none)"


def run(
    rows: options.Rows,
    row: int = typer.Option(0, "--row", help="Which row to show, from 0."),
    tokens: bool = typer.Option(
        False, "--tokens", help="Also list each token: place, id, text, + if supervised."
    ),
    target: str | None = typer.Option(
        None, "--target", help="Where the tokenizer is now; default where prepare found it."
    ),
    trust_remote_code: options.TrustRemoteCode = False,
    as_json: options.AsJson = False,
) -> None:
    from eagle_train.data.inspect import (
        answers_at,
        bracketed,
        count_lines,
        describe_row,
        print_coloured,
        shown,
    )
    from eagle_train.data.rows import open_rows
    from eagle_train.progress import counted

    opened = open_rows(rows)
    described = describe_row(opened, row, target, trust_remote_code)
    if as_json:
        print(json.dumps({"rows": shown(opened.info), "row": described}, indent=2, ensure_ascii=False))
        return
    for line in count_lines(opened.info):
        print(line)
    print(
        f"row {row} of {len(opened)}: {described['row_id']}, from {described['source']}, "
        f"{counted(len(described['input_ids']), 'token')}, {answers_at(described['spans'])}"
        + (f", category {described['category']}" if described.get("category") else "")
    )
    if sys.stdout.isatty():
        print(f"bold green: {_SUPERVISED}; dim: read only\n")
        print_coloured(described["segments"])
    else:
        print(f"between ⟦ and ⟧: {_SUPERVISED}; all else: read only\n")
        print(bracketed(described["segments"]))
    if tokens:
        print("\nplace, id, + if supervised, text")
        for place, (number, text, bit) in enumerate(
            zip(described["input_ids"], described["token_texts"], described["loss_mask"], strict=True)
        ):
            print(f"{place:>6} {number:>7} {'+' if bit else ' '} {text!r}")
