"""``eagle import``: parse, then one call."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import typer

from . import options

NAME = "import"
HELP = "Read a head of another layout (EAGLE, SpecForge, speculators, ModelOpt, eagle export's own)."
EXAMPLES = """
**Examples**

    eagle import yuhuili/EAGLE3-LLaMA3.1-Instruct-8B --out head/

    eagle import their-head/ --target meta-llama/Llama-3.1-8B-Instruct --out head/

    eagle import their-head/ --layer-ids 2,16,29 --rope-theta 10000 --out head/
"""


def run(
    source: str = typer.Argument(..., metavar="DIR_OR_HUB_ID", help="The head's directory, or its hub id."),
    out: Path = typer.Option(..., "--out", help="The folder to make; an earlier import there is replaced."),
    target: str | None = typer.Option(
        None, "--target", help="Its target: recorded, and how deep it is may tell what layer ids mean."
    ),
    layer_ids: str | None = typer.Option(
        None, "--layer-ids", metavar="A,B,C", help="Captured layers: the target layers that the states enter."
    ),
    rope_theta: float | None = typer.Option(
        None, "--rope-theta", min=1.0, help="Plain RoPE of this base, whatever config.json says."
    ),
    norm_before_residual: bool | None = typer.Option(
        None,
        "--norm-before-residual/--no-norm-before-residual",
        help="Whether the first layer's residual is the normed feature, where config.json is silent.",
    ),
    sliding_window: int | None = typer.Option(
        None, "--sliding-window", min=0, help="Rows that a row sees, 0 for all, where readers differ."
    ),
    overwrite: options.Overwrite = False,
    as_json: options.AsJson = False,
) -> None:
    from eagle_train.export.importing import import_head
    from eagle_train.heads.foreign_config import Told

    told = Told(
        options.parse_layers("--layer-ids", layer_ids), rope_theta, norm_before_residual, sliding_window
    )
    made = import_head(source, out, target=target, told=told, overwrite=overwrite)
    print(json.dumps(made) if as_json else "\n".join(_lines(made)))


def _lines(made: dict[str, Any]) -> list[str]:
    layers = ", ".join(f"hs[{k}]" for k in made["feature_layers"]) or "those usual for the target's depth"
    rope = made["rope"]
    found = [
        f"{made['out']}: {made['kind']} head from the layout of {made['layout']}, {made['dtype']}, "
        f"{made['size']}",
        f"reads: {layers}" if made["kind"] == "eagle3" else "reads: the target's last state",
        f"RoPE: {rope['rope_type']}, base {rope['rope_theta']:g}; "
        f"draft vocabulary: {made['draft_vocab_size']:,} of {made['vocab_size']:,} tokens",
    ]
    found += [f"switches: {', '.join(made['switches'])}"] if made["switches"] else []
    found += [f"note: {note}" for note in made["notes"]]
    target = made["target"]
    if "/" not in target and not Path(target).exists():
        target = "TARGET"  # none, or the name of a folder that is elsewhere
    return [*found, f"next: {options.eval_command(made['out'], target)}"]
