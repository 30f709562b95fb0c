"""``eagle shards``: parse, then one call."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import typer

from . import options

NAME = "shards"
HELP = "Care for shard directories: verify, info, merge, split, prune."
EXAMPLES = """
**Examples**

    eagle shards verify shards/

    eagle shards merge shards-a/ shards-b/ --out shards/

    eagle shards prune shards/ --damaged
"""
# What each action reads beside the directories.
_ACTIONS = {
    "verify": set[str](),
    "info": set[str](),
    "merge": {"out"},
    "split": {"out", "parts"},
    "prune": {"shard", "row", "damaged"},
}


def run(
    context: typer.Context,
    action: str = typer.Argument(
        ...,
        metavar="ACTION",
        help="verify: read every byte; info: what is there; merge: several directories into one; split: one "
        "into several (files are linked where they can be: damage to one is damage to both); prune: remove "
        "shards; those of eagle extract it makes anew, a merged or split directory goes on without them.",
    ),
    folders: list[Path] = typer.Argument(
        ..., metavar="DIR...", help="What eagle extract made; several to merge."
    ),
    out: Path | None = typer.Option(None, "--out", help="merge, split: the new directory."),
    parts: int = typer.Option(2, "--parts", min=2, help="split: into so many, OUT/part-0 and on."),
    shard: list[int] | None = typer.Option(
        None, "--shard", help="prune: the number in a shard's name; repeat it."
    ),
    row: list[str] | None = typer.Option(None, "--row", help="prune: a row's id, its shard goes; repeat it."),
    damaged: bool = typer.Option(False, "--damaged", help="prune: shards that are cut or changed."),
    as_json: options.AsJson = False,
) -> None:
    from eagle_train.errors import UserError, nearest
    from eagle_train.progress import counted
    from eagle_train.shards import pruning, upkeep

    if action not in _ACTIONS:
        raise UserError(f"shards {action}: wanted one of {', '.join(_ACTIONS)}{nearest(action, _ACTIONS)}")
    unread = set().union(*_ACTIONS.values()) - _ACTIONS[action]
    options.refuse_unread(context, unread, f"{action} is asked for")
    if action != "merge" and len(folders) > 1:
        raise UserError(f"shards {action}: got {len(folders)} directories, wanted one")
    if action in ("merge", "split") and out is None:
        raise UserError(f"shards {action}: give the new directory with --out")
    if action == "prune" and not (shard or row or damaged):
        raise UserError("shards prune: say what to remove with --shard, --row or --damaged")
    folder = folders[0]
    if action == "verify":
        found = upkeep.verify(folder)
        _print(found, as_json)
        for fault in [] if as_json else found["faults"]:
            print(f"damaged: {fault}")
        if found["faults"]:
            raise UserError(f"{folder}: {counted(len(found['faults']), 'fault')}; {found['advice']}")
    elif action == "info":
        _print(upkeep.describe(folder), as_json)
    elif action == "merge":
        assert out is not None
        _print(upkeep.merge(folders, out), as_json)
    elif action == "split":
        assert out is not None
        made = upkeep.split(folder, out, parts)
        if as_json:
            print(json.dumps(made))
        for part in [] if as_json else made:
            _print(part, as_json)
    else:
        pruned = pruning.prune(folder, shards=shard or (), rows=row or (), damaged=damaged)
        if as_json:
            print(json.dumps(pruned))
            return
        what = ", ".join(pruned["removed"]) or "nothing"
        print(f"{folder}: removed {what}; {counted(pruned['shards'], 'shard')} left")
        if pruned["removed"] and pruned["extract_again"]:
            print("next: the same eagle extract, which makes them anew")


def _print(found: dict[str, Any], as_json: bool) -> None:
    if as_json:
        print(json.dumps(found))
        return
    from eagle_train.progress import bytes_text, counted

    target = found["target"]
    state = "" if found["complete"] else f", unfinished, {found['shards_there']} there; as planned"
    if found["removed"]:
        state += f", {counted(found['removed'], 'row')} more removed by prune"
    layers = f", layers {', '.join(map(str, found['layer_ids']))}" if found["layer_ids"] else ""
    if top := found["label_top_k"]:
        kept = "" if found["label_mass"] is None else f" ({found['label_mass']:.2%} of its probability)"
        layers += f", the {top} likeliest tokens of each label{kept}"
    each = f" ({bytes_text(found['bytes_per_token'])} a token)" if found["bytes_per_token"] else ""
    print(
        f"{found['folder']}: {counted(found['shards'], 'shard')}{state}: {counted(found['rows'], 'row')}, "
        f"{counted(found['tokens'], 'token')}, {found['labels']:,} supervised, "
        f"{bytes_text(found['bytes'])}{each}, "
        f"and {bytes_text(found['target_bytes'])} of the target's embedding and lm_head"
    )
    print(
        f"{found['folder']}: {found['features']}{layers}, codec {found['codec']}, of {target['name']} "
        f"({target['fingerprint']}) in {target['dtype']}"
    )
    if "faults" in found:
        print(f"{found['folder']}: {counted(len(found['faults']), 'fault')}")
