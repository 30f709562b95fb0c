"""The run folder's own records, and the decision whether a command starts, continues or is refused."""

from __future__ import annotations

import contextlib
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import torch

from eagle_train.config import Recipe
from eagle_train.distributed import is_main
from eagle_train.errors import UserError
from eagle_train.io.paths import make_folder, os_error
from eagle_train.io.text import read_json, write_json, write_text
from eagle_train.provenance import tool_version
from eagle_train.recipe_files import load_recipe
from eagle_train.shards.manifest import rows_held
from eagle_train.training.checkpoints import LINKS, newest

if TYPE_CHECKING:
    from eagle_train.shards.row_source import RowSource

RECIPE, RECORD, LOCK = "recipe.yaml", "run.json", ".lock"
STREAM = "shards"  # the folder of shards that pass by, where a run has such
# What a run leaves in its folder; anything else there belongs to somebody else.
_OWN = {RECIPE, RECORD, "metrics.jsonl", "checkpoints", "best", "last", "wandb", "tensorboard"}
_OWN |= {"report.html", STREAM}
# A resumed run may not change these: what the head is, which rows a step sees, what a checkpoint holds.
_FIXED = (
    "head.",
    "data.tokens_per_step",
    "data.rows_per_step",
    "data.held_out",
    "run.seed",
    "optim.name",
    "optim.ema",
)


def fingerprint(shards: RowSource) -> str:
    """Return a text that agrees exactly when two sources give the same rows and features."""
    return rows_held(shards.info)


def plans(shards: RowSource) -> set[str]:
    """Return the plan of every extraction that shards come from, and their own."""
    own = shards.info["plan"]
    return {own, *(entry.get("plan", own) for entry in shards.info["shards"])}


@dataclass
class Lock:
    """The run folder held for this process as long as `file` is open."""

    file: IO[str]
    new_file: bool
    new_folder: bool


def lock(out: Path) -> Lock | None:
    """Hold the folder for this process; refuse where another has it. None where the system has no locks."""
    try:
        import fcntl
    except ImportError:
        return None
    new_folder, new_file = not out.exists(), not (out / LOCK).exists()
    try:
        handle = open(make_folder(out) / LOCK, "w")  # noqa: SIM115
    except OSError as error:
        raise os_error(out, error) from error
    try:
        fcntl.lockf(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError) as error:  # which one depends on the system
        handle.close()
        raise UserError(
            f"{out}: another eagle train is at work in it; wait for it, or choose another --out"
        ) from error
    except OSError:  # a file system without locks
        pass
    return Lock(handle, new_file, new_folder)


def release(out: Path, held: Lock | None) -> None:
    """Let go of a folder in which nothing was begun; what `lock` made is gone again."""
    if held is None:
        return
    with contextlib.suppress(OSError):
        if held.new_file:
            (out / LOCK).unlink()
        if held.new_folder:
            out.rmdir()
    held.file.close()


def _names(folder: Path) -> list[str]:
    try:
        return os.listdir(folder)
    except FileNotFoundError:
        return []
    except OSError as error:
        raise os_error(folder, error) from error


def look(out: Path, resume: bool, init_from: str | None) -> Path | None:
    """Return the newest checkpoint of the run in `out`, None where none is; nothing is written.

    Raises UserError for a folder in which a run may neither begin nor go on.
    """
    if resume and init_from is not None:
        raise UserError(
            f"--resume {out}: goes on from the run's own checkpoint; leave --init-from {init_from} out"
        )
    for name in LINKS:
        if (out / name).is_dir() and not (out / name).is_symlink():
            raise UserError(f"{out / name}: a folder, wanted a link of the run's own; remove {out / name}")
    found = newest(out)
    if not (out / RECIPE).is_file():
        if resume:
            raise UserError(f"--resume {out}: holds no run; leave --resume out to start one")
        if found is not None:
            raise UserError(f"{out}: holds checkpoints without a {RECIPE}; choose another --out")
        if foreign := sorted(name for name in _names(out) if name not in _OWN and not name.startswith(".")):
            raise UserError(f"{out}: holds other files ({foreign[0]}); choose an empty or new --out")
    return found


def decide(out: Path, recipe: Recipe, shards: RowSource, resume: bool, init_from: str | None) -> str | None:
    """Return the head that the run in `out` begins or began with, None for a new one.

    Raises UserError where neither starting nor going on is right, in a folder that `look` lets pass.

    The same command on a folder that it began in continues there. Other settings need `resume`, and may
    then change anything but the head, the data order and the held-out split.
    """
    if not (out / RECIPE).is_file():
        return init_from
    record = read_json(out / RECORD, "choose another --out")
    if record.get("shards") != fingerprint(shards):
        raise UserError(
            f"{out}: trained on other shards or rows ({record.get('shards')}, these are "
            f"{fingerprint(shards)}); choose another --out, or start from its head with --init-from"
        )
    try:
        before = load_recipe(out / RECIPE)
    except UserError as error:
        raise UserError(f"{out / RECIPE}: damaged ({error}); choose another --out") from error
    changes = _changes(before.to_dict(), recipe.to_dict())
    if not resume and init_from != record.get("init_from"):
        changes.append(("--init-from", record.get("init_from"), init_from))
    words = [f"{key}={new} (it had {old})" for key, old, new in changes]
    fixed = [word for (key, _, _), word in zip(changes, words, strict=True) if key.startswith(_FIXED)]
    if resume and fixed:
        raise UserError(f"--resume {out}: cannot change {fixed[0]}; choose another --out")
    if not resume and words:
        raise UserError(
            f"{out}: holds a run made with other settings: {words[0]}. "
            "Choose another --out, or give --resume to go on with the new ones"
        )
    if resume and words and is_main():
        print(f"{out}: going on with {', '.join(words)}", file=sys.stderr)
    return record.get("init_from")


def record_run(
    out: Path, recipe: Recipe, shards: RowSource, init_from: str | None, details: dict[str, Any]
) -> None:
    """Write run.json, then recipe.yaml, whose presence says that `out` holds a run."""
    make_folder(out)
    write_json(
        out / RECORD,
        {
            "recipe": recipe.name,
            "shards": fingerprint(shards),
            "shards_folder": str(shards.folder),
            "plans": sorted(plans(shards)),
            "rows_fingerprint": shards.info.get("rows_fingerprint"),
            "target": shards.info["target"],
            "init_from": init_from,
            "tool_version": tool_version(),
            "torch_version": str(torch.__version__),
            **details,
        },
    )
    write_text(out / RECIPE, f"# Resolved from recipe {recipe.name}\n{recipe.to_yaml()}")


def check_there(out: Path) -> None:
    """Raise UserError where the records of the run at work in `out` are gone: nothing goes on there."""
    if gone := [name for name in (RECIPE, RECORD) if not (out / name).is_file()]:
        raise UserError(
            f"{out}: {' and '.join(gone)} gone since the run began, so it can neither save nor go on there; "
            "choose another --out"
        )


def _changes(before: dict[str, Any], now: dict[str, Any]) -> list[tuple[str, Any, Any]]:
    return [
        (f"{section}.{key}", old, now[section][key])
        for section, keys in before.items()
        for key, old in keys.items()
        if now[section][key] != old
    ]
