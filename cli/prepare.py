"""``eagle prepare``: parse, then one call."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from . import options

NAME = "prepare"
HELP = "Turn conversations into token rows with a loss mask."
EXAMPLES = """
**Examples**

    eagle prepare chats.json --target HuggingFaceTB/SmolLM2-135M-Instruct --out rows/

    eagle prepare sharegpt.json=0.5 answers.jsonl.gz --target ./my-model --max-length 4096 --out rows/

    eagle prepare HuggingFaceH4/ultrachat_200k:train_sft --target ./vicuna --chat-template vicuna --out rows/
"""


def run(
    data: Annotated[
        list[str],
        typer.Argument(
            metavar="DATA...",
            help='Files (.json, .jsonl, also .gz, .parquet) of records {"messages": [{"role": "user", '
            '"content": "Hi"}, ...]} or ShareGPT\'s {"conversations": [{"from": "human", "value": '
            '"Hi"}, ...]}; folders, globs, or hub datasets as owner/name[:split]; behind one, =0.5 is its '
            "weight in a mixture. A record's category is kept.",
        ),
    ],
    target: options.Target,
    out: Path = typer.Option(..., "--out", help="Folder for the rows."),
    chat_template: options.ChatTemplate = None,
    template_arg: options.TemplateArg = None,
    max_length: int = typer.Option(
        2048, "--max-length", help="Tokens of a row; what is longer is cut on the right."
    ),
    last_turn_only: bool = typer.Option(
        False, "--last-turn-only", help="Supervise the last answer of each conversation alone."
    ),
    drop_duplicates: bool = typer.Option(
        False, "--drop-duplicates", help="Leave out rows that equal an earlier one."
    ),
    skip_bad: options.SkipBad = False,
    num_proc: int | None = typer.Option(
        None, "--num-proc", min=1, help="Worker processes; default one a core."
    ),
    overwrite: bool = typer.Option(False, "--overwrite", help="Replace other rows that are at --out."),
    trust_remote_code: options.TrustRemoteCode = False,
    as_json: options.AsJson = False,
) -> None:
    from eagle_train.data.inspect import shown
    from eagle_train.data.prepare import prepare
    from eagle_train.data.templates import parse_arguments

    summary = prepare(
        data,
        target,
        out,
        chat_template=chat_template,
        template_arguments=parse_arguments(template_arg or []),
        max_length=max_length,
        last_turn_only=last_turn_only,
        drop_duplicates=drop_duplicates,
        skip_bad=skip_bad,
        num_proc=num_proc,
        overwrite=overwrite,
        trust_remote_code=trust_remote_code,
    )
    if as_json:
        print(json.dumps(shown(summary), indent=2, ensure_ascii=False))
        return
    _print(summary, target, out)


def _print(summary: dict[str, Any], target: str, out: Path) -> None:
    import shlex

    from eagle_train.data.inspect import count_lines

    if summary["reused"]:
        print(f"{out}: these rows are already there; nothing to do (--overwrite makes them again)")
    for line in count_lines(summary):
        print(line)
    print(f"next: eagle extract {shlex.quote(str(out))} --target {shlex.quote(target)} --out shards/")
    print(f"look: eagle inspect {shlex.quote(str(out))} --row 0")
