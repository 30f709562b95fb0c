"""Checkpoints of a run: a head that serves, and beside it all that going on needs.

    run/checkpoints/step-000500/   config.json + model.safetensors (the head, float32)
                                   trainer.safetensors (optimizer), trainer.json (written last)
    run/best, run/last             links to two of them

A checkpoint is written under a temporary name and renamed, so one that has its name is whole; sizes are
compared besides, against half-copied folders. Resuming takes the newest whole one.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from dataclasses import asdict, dataclass, fields
from pathlib import Path

from eagle_train.errors import UserError
from eagle_train.heads.disk import CONFIG, WEIGHTS, Head, load_head, save_head
from eagle_train.io import load_tensors, make_folder, os_error, read_json, save_tensors, write_json
from eagle_train.training.optim import Optimizers

FOLDER, TENSORS, RECORD = "checkpoints", "trainer.safetensors", "trainer.json"
FORMAT_VERSION = 1


@dataclass
class State:
    """How far a run has come."""

    step: int = 0  # optimizer steps, skipped ones included
    tokens: int = 0
    seconds: float = 0.0  # on the clock, over all its sessions
    skipped: int = 0  # steps whose gradient was not finite
    tau: float | None = None  # of the latest evaluation
    best_tau: float | None = None
    best_step: int | None = None


def save_checkpoint(run: Path, head: Head, optimizers: Optimizers, state: State) -> Path:
    """Write everything at this step and point ``last`` (and ``best`` where this is it) to it.

    Returns the folder. Raises UserError, leaving nothing, when it cannot be written.
    """
    final = folder_of(run, state.step)
    if not is_whole(final):
        temporary = final.with_name(f".{final.name}.{os.getpid()}.tmp")
        try:
            make_folder(temporary)
            save_head(head, temporary)
            save_tensors(temporary / TENSORS, optimizers.state())
            sizes = {name: (temporary / name).stat().st_size for name in (CONFIG, WEIGHTS, TENSORS)}
            record = {"format_version": FORMAT_VERSION, "state": asdict(state), "files": sizes}
            write_json(temporary / RECORD, record)
            if final.exists():  # a damaged copy
                shutil.rmtree(final)
            os.replace(temporary, final)
        except OSError as error:
            raise os_error(final, error) from error
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
    point(run, state)
    return final


def load_checkpoint(folder: Path, optimizers: Optimizers) -> State:
    """Load optimizer and position from a checkpoint (its head: `read_head`). Raises UserError.

    Where the best checkpoint is gone, the next evaluation chooses anew.
    """
    record = read_json(folder / RECORD, "choose another checkpoint")
    tensors, _ = load_tensors(folder / TENSORS)
    optimizers.load(tensors, str(folder / TENSORS))
    known = {field.name for field in fields(State)}
    state = State(**{key: value for key, value in record["state"].items() if key in known})
    if state.best_step is not None and not is_whole(folder.with_name(_name(state.best_step))):
        state.best_step = state.best_tau = None
    return state


def newest(run: Path) -> Path | None:
    """Return the whole checkpoint of the highest step, None without one."""
    whole = [folder for folder in _folders(run) if is_whole(folder)]
    return whole[-1] if whole else None


def is_whole(folder: Path) -> bool:
    """True when the record is there and every file has the size it names."""
    if not (folder / RECORD).is_file():
        return False
    with contextlib.suppress(UserError, OSError, AttributeError):
        record = read_json(folder / RECORD, "")
        return record.get("format_version") == FORMAT_VERSION and all(
            (folder / name).stat().st_size == size for name, size in record["files"].items()
        )
    return False


def prune(run: Path, keep_last: int, state: State) -> None:
    """Delete all but the newest `keep_last` checkpoints and the best; leftovers of killed writes too."""
    whole = [folder for folder in _folders(run) if is_whole(folder)]
    best = folder_of(run, state.best_step) if state.best_step is not None else None
    for folder in whole[:-keep_last]:
        if folder != best:
            shutil.rmtree(folder, ignore_errors=True)


def sweep(run: Path) -> None:
    """Delete what killed writers left under temporary names."""
    for leftover in (run / FOLDER).glob(".step-*.tmp"):
        shutil.rmtree(leftover, ignore_errors=True)


def point(run: Path, state: State) -> None:
    """Let ``last`` and ``best`` lead to the checkpoints that `state` names."""
    best = state.step if state.best_step is None else state.best_step
    for name, step in (("last", state.step), ("best", best)):
        if is_whole(folder_of(run, step)):
            _link(run / name, Path(FOLDER) / folder_of(run, step).name)


def head_folder(path: str | Path) -> Path:
    """Return the head directory behind a run (its best) or a head directory; UserError otherwise."""
    for folder in (Path(path), Path(path) / "best"):
        if (folder / CONFIG).is_file() and (folder / WEIGHTS).is_file():
            return folder
    raise UserError(f"{path}: holds neither {CONFIG} and {WEIGHTS} nor a run's best; wanted a head or a run")


def read_head(folder: Path) -> Head:
    """Load a head with float32 weights, as training wants them."""
    return load_head(folder).float()


def _link(link: Path, to: Path) -> None:
    """Replace a symbolic link in one step."""
    temporary = link.with_name(f".{link.name}.{os.getpid()}.tmp")
    try:
        temporary.unlink(missing_ok=True)
        temporary.symlink_to(to)
        os.replace(temporary, link)
    except OSError as error:
        raise os_error(link, error) from error


def folder_of(run: Path, step: int) -> Path:
    """Return the folder of the checkpoint after `step` steps."""
    return run / FOLDER / _name(step)


def _name(step: int) -> str:
    return f"step-{step:06d}"


def _folders(run: Path) -> list[Path]:
    """All named checkpoints, whole or not, by step."""
    found = [f for f in (run / FOLDER).glob("step-*") if f.name.removeprefix("step-").isdigit()]
    return sorted(found, key=lambda folder: int(folder.name.removeprefix("step-")))
