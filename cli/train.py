"""``eagle train``: parse, then one call."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from eagle_train.errors import UserError

from . import options

if TYPE_CHECKING:
    from eagle_train.training.dry_run import Rehearsal
    from eagle_train.training.source import LiveTarget

NAME = "train"
HELP = (
    "Train a draft head on shards, or on rows with the target at work. An interrupted run goes on when the "
    "same command is given again."
)
EXAMPLES = """
**Examples**

    eagle train shards/ --recipe eagle3 --out run/

    eagle train rows/ --online --target ./my-model --recipe eagle3 --processes 2 --out run/

    torchrun --nproc-per-node 8 -m eagle_cli.main train shards/ --recipe my.yaml --track wandb --out run/
"""

_OF_THE_TARGET = (
    "target",
    "dtype",
    "target_device",
    "batch_tokens",
    "codec",
    "label_top_k",
    "trust_remote_code",
)


def run(
    context: typer.Context,
    shards: Path = typer.Argument(
        ...,
        metavar="SHARDS",
        help="The folder that eagle extract made; with --online or --max-disk the rows of eagle prepare.",
    ),
    recipe: str = typer.Option(
        ...,
        "--recipe",
        help="A built-in recipe (eagle1, eagle3, eagle3-smollm2, eagle3-llama3.1-8b, ...; a wrong name lists "
        "all), or the path of a .yaml file with keys as in eagle_train/config.py, such as extends: eagle3 "
        "and run: {epochs: 2}.",
    ),
    out: Path = typer.Option(
        ..., "--out", help="Folder of the run: recipe, metrics, checkpoints, best, last."
    ),
    settings: list[str] = typer.Option(
        [], "--set", metavar="KEY=VALUE", help="Change one setting, such as optim.lr=1e-4; repeatable."
    ),
    resume: bool = typer.Option(
        False, "--resume", help="Go on with a run although settings changed, such as more epochs."
    ),
    init_from: str | None = typer.Option(
        None,
        "--init-from",
        metavar="HEAD",
        help="Start from this head: a run or a head folder, also another toolkit's.",
    ),
    online: bool = typer.Option(
        False, "--online", help="Train on rows without shards: --target computes features in these processes."
    ),
    max_disk: str | None = typer.Option(
        None,
        "--max-disk",
        metavar="SIZE",
        help="Train one epoch on rows while their shards are made, read and removed in OUT/shards: never "
        "more of them than SIZE, such as 200GB.",
    ),
    target: str | None = typer.Option(
        None, "--target", help="With these two: hub id, directory or .gguf file of the rows' target."
    ),
    dtype: options.Dtype = "auto",
    target_device: str | None = typer.Option(
        None, "--target-device", help="Where the target runs, such as cuda:1; default where training does."
    ),
    batch_tokens: int | None = typer.Option(
        None, "--batch-tokens", min=1, help="Tokens of one forward of the target; default as for extract."
    ),
    codec: str = typer.Option("bf16", "--codec", help="With --max-disk: bf16, fp32, fp8 or int8."),
    label_top_k: int = typer.Option(
        0, "--label-top-k", min=0, help="With --max-disk: store labels as extract does; eagle3 alone."
    ),
    trust_remote_code: options.TrustRemoteCode = False,
    processes: int | None = typer.Option(
        None, "--processes", help="Processes on this machine; default one, or those torchrun started."
    ),
    deepspeed: str | None = typer.Option(
        None,
        "--deepspeed",
        metavar="zero2|zero3|FILE",
        help="Partition over processes; FILE is a DeepSpeed JSON, such as recipes/deepspeed/zero2.json.",
    ),
    track: list[str] = typer.Option(
        [],
        "--track",
        metavar="NAME",
        help="Follow the run in wandb, wandb-offline, tensorboard or trackio; repeatable.",
    ),
    rehearse: bool = typer.Option(
        False, "--dry-run", help="Build all, overfit one row, show acceptance rising; nothing is written."
    ),
    as_json: options.AsJson = False,
) -> int | None:
    from eagle_train.recipe_files import load_recipe

    if track:
        from eagle_train.training.trackers import check_tracker

        for name in track:
            check_tracker(name)
    if resume and rehearse:
        raise UserError(f"--resume {out}: a dry run begins anew and reads no run; leave one of the two out")
    live = None
    if online or max_disk is not None:
        live = _live(context, online, max_disk)
    else:
        why = "features come from shards without --online or --max-disk"
        options.refuse_unread(context, _OF_THE_TARGET, why)
    resolved = load_recipe(recipe, settings)
    if processes is not None and processes != 1:
        from eagle_train.launch import relaunch

        relaunch(processes, options.typed(context, leaving=("processes",)))
        return None

    from eagle_train.distributed import is_main
    from eagle_train.training.processes import leave_processes

    if rehearse:
        from eagle_train.training.dry_run import as_json as figures
        from eagle_train.training.dry_run import dry_run

        again = options.typed(context, leaving=("rehearse", "processes"))
        found = dry_run(shards, resolved, live=live, init_from=init_from, deepspeed=deepspeed)
        if is_main():
            print(json.dumps(figures(found)) if as_json else _rehearsed(found, _following(again, processes)))
        leave_processes()
        return 0 if found.learned else 1

    from eagle_train.training.loop import train

    summary = train(
        shards,
        resolved,
        out,
        live=live,
        resume=resume,
        init_from=init_from,
        trackers=track,
        deepspeed=deepspeed,
    )
    if is_main():
        print(json.dumps(summary) if as_json else _words(summary))
    leave_processes()
    return None


def kept(out: Path, rehearse: bool, **_: Any) -> str:
    """Say what interrupted training leaves."""
    if rehearse:
        return "a dry run keeps nothing"
    return "finished steps are kept" if (out / "last").exists() else "no step was saved yet"


def _live(context: typer.Context, online: bool, max_disk: str | None) -> LiveTarget:
    from eagle_train.training.source import LiveTarget

    given = context.params
    mode = "--online" if online else "--max-disk"
    if online and max_disk is not None:
        raise UserError(
            f"--online --max-disk {max_disk}: online nothing is on disk; leave one of the two out"
        )
    if given["target"] is None:
        raise UserError(f"{mode}: needs the rows' target; give --target T")
    if online:
        options.refuse_unread(context, ("codec", "label_top_k"), "--online stores nothing")
    return LiveTarget(
        given["target"],
        given["dtype"],
        given["target_device"],
        given["batch_tokens"],
        given["trust_remote_code"],
        None if max_disk is None else options.parse_size("--max-disk", max_disk),
        given["codec"],
        given["label_top_k"],
    )


def _following(again: list[str], processes: int | None) -> str:
    """Return the command that was rehearsed, without --dry-run."""
    from eagle_train.distributed import launched, relaunched

    if launched() and relaunched() is None:
        return "the same launch without --dry-run"
    processes = processes or relaunched()
    return shlex.join(["eagle", *again, *(["--processes", str(processes)] if processes else [])])


def _rehearsed(found: Rehearsal, command: str) -> str:
    from eagle_train.progress import counted

    return (
        f"dry run: {counted(found.steps, 'step')} on one row, {found.seconds_per_step:.2f} s each; loss "
        f"{found.loss[0]:.3f} to {found.loss[1]:.3f}; acceptance length {found.tau[0]:.2f} to "
        f"{found.tau[1]:.2f} of at most {found.longest:.2f}"
        + (f"\nnext: {command}" if found.learned else "; a head that learns goes further: look at the shards")
    )


def _words(summary: dict[str, Any]) -> str:
    from eagle_train.progress import counted, span
    from eagle_train.training.held_out import on_held_out

    tau = f"no conversations held out, so best is the last checkpoint, step {summary['steps']:,}"
    if summary["best_tau"] is not None:
        tau = (
            f"best at step {summary['best_step']:,}: acceptance length {summary['best_tau']:.3f} "
            f"(chain of {summary['gamma']}, predicted "
            f"{on_held_out(summary['held_out_conversations'])}; exact for answers that "
            "the target wrote greedily; a head that is never right has 1)"
        )
    skipped = f", {summary['skipped']} skipped (gradient not finite)" if summary["skipped"] else ""
    early = ", ended by run.patience" if summary["out_of_patience"] else ""
    return (
        f"{summary['out']}: {counted(summary['steps'], 'step')}{skipped}, {summary['tokens']:,} tokens in "
        f"{span(summary['seconds'])}{early}; {tau}\n"
        f"next: {options.eval_command(summary['out'], summary['target'])}"
    )
