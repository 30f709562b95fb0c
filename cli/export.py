"""``eagle export``: parse, then one call."""

from __future__ import annotations

import json
from pathlib import Path

import typer

from . import options

NAME = "export"
HELP = "Write the directory that a serving engine loads, and check it."
EXAMPLES = """
**Examples**

    eagle export run/ --engine vllm --out head/

    eagle export run/checkpoints/step-000500 --engine sglang --dtype bf16 --out head/

    eagle export run/ --engine speculators --target OWNER/TARGET --out head/ --push-to-hub OWNER/HEAD
"""


def run(
    source: str = typer.Argument(
        ...,
        metavar="RUN_OR_HEAD",
        help="A run of eagle train (its best), one of its checkpoints, a head directory or a hub id.",
    ),
    engine: str = typer.Option(
        ...,
        "--engine",
        help="vllm or sglang (an EAGLE-3 export is the same for both), speculators (vLLM's other layout), or "
        "eagle (the code of EAGLE's repository).",
    ),
    out: Path = typer.Option(..., "--out", help="The folder to make; an earlier export there is replaced."),
    dtype: str = typer.Option(
        "auto",
        "--dtype",
        help="bf16, fp16, fp32, keep (as trained), or auto: that of the target's checkpoint, to which eval "
        "and engines cast the head; where that is not at hand, the one it had in training, else keep.",
    ),
    target: str | None = typer.Option(
        None, "--target", help="The target's hub id or directory; default what the head records."
    ),
    overwrite: options.Overwrite = False,
    push_to_hub: str | None = typer.Option(
        None, "--push-to-hub", metavar="OWNER/NAME", help="Upload it to this model repository too."
    ),
    private: bool = typer.Option(False, "--private", help="Make a repository that is new private."),
    as_json: options.AsJson = False,
) -> None:
    from eagle_train.export import hub
    from eagle_train.export.card import acceptance_words
    from eagle_train.export.export import export

    if push_to_hub is not None:
        hub.check_repository(push_to_hub)
    made = export(source, out, engine=engine, dtype=dtype, overwrite=overwrite, target=target)
    if push_to_hub is not None:
        made["pushed_to"] = hub.push(out, push_to_hub, private=private)
    if as_json:
        print(json.dumps(made))
        return
    change = made["logits_changed_by"]
    equal = "equal to the bit" if change == 0 else f"within {change:.2%} by rounding to {made['dtype']}"
    which = f" of {source} ({made['checkpoint']})" if made["checkpoint"] else ""
    engines = " and ".join(made["serve"])
    print(f"{out}: {made['kind']} head{which} for {engines}, {made['dtype']}, {made['size']}")
    print(f"read back: every tensor as the engine wants it; logits {equal}")
    for other, why in made["refused"].items():
        print(f"not for {other}: {why}")
    if made["target_path"]:
        print(
            f"the card's commands call the target '{made['target']['name']}', its folder's name: before you "
            "publish it, export again with --target and the target's hub id"
        )
    for name, command in made["serve"].items():
        print(f"serve with {name}: {command}")
    if made["acceptance"]:
        print(acceptance_words(made["acceptance"]))
    if push_to_hub is not None:
        print(f"uploaded: {made['pushed_to']}")
    named = made["target_path"] or made["target"]["name"] or "TARGET"
    print(f"next: {options.eval_command(str(out), named)}")
