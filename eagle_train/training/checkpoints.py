"""Checkpoints of a run: a head that serves, and beside it all that going on needs.

    run/checkpoints/step-000500/   config.json + model.safetensors (the head, float32)
                                   trainer.safetensors (optimizer), trainer.json (written last)
    run/best, run/last             links to two of them

A checkpoint is written under a temporary name and renamed, so one that has its name is whole. Its record
holds every file's SHA-256 besides: resuming takes the newest checkpoint whose files are what was written.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from torch import Tensor

from eagle_train.distributed import is_main
from eagle_train.errors import UserError
from eagle_train.heads.disk import CONFIG, WEIGHTS, Head, load_head, save_head
from eagle_train.heads.foreign import FILES
from eagle_train.io.checksums import sha256_file
from eagle_train.io.paths import os_error
from eagle_train.io.tensors import save_tensors
from eagle_train.io.text import read_json, write_json
from eagle_train.io.whole_folder import replacing_folder

FOLDER, TENSORS, RECORD = "checkpoints", "trainer.safetensors", "trainer.json"
LINKS = ("best", "last")
FORMAT_VERSION = 2
DIGITS = 5  # of an acceptance length, behind the point
_TOO_LARGE = 2**63


@dataclass
class State:
    """How far a run has come."""

    step: int = 0  # optimizer steps, skipped ones included
    tokens: int = 0
    seconds: float = 0.0  # on the clock, over all its sessions
    skipped: int = 0  # steps whose gradient was not finite
    tau: float | None = None  # of the latest evaluation
    evaluated_step: int | None = None  # the step of that evaluation
    best_tau: float | None = None
    best_step: int | None = None
    num_worse: int = 0  # evaluations since the best

    def judge(self, step: int, tau: float) -> bool:
        """Take note of an evaluation; return True when it is the best so far of a trained head.

        The first of equals is the best, equal in the digits that metrics.jsonl holds; step 0 is untrained.
        """
        self.tau, self.evaluated_step = tau, step
        if step == 0:
            return False
        better = self.best_tau is None or round(tau, DIGITS) > round(self.best_tau, DIGITS)
        self.num_worse = 0 if better else self.num_worse + 1
        if better:
            self.best_tau, self.best_step = tau, step
        return better


def save_checkpoint(run: Path, head: Head, trainer: Mapping[str, Tensor], state: State) -> Path:
    """Write the head and the `trainer`'s tensors at this step; point ``last`` (and ``best``) to it.

    Where this step is on disk already only its record is written anew. Returns the folder. Raises
    UserError, leaving nothing, when it cannot be written.
    """
    final = folder_of(run, state.step)
    if fault_of(final) is None:
        write_json(final / RECORD, _record(state, read_record(final)[1]))
    else:
        with replacing_folder(final) as temporary:
            save_head(head, temporary)
            save_tensors(temporary / TENSORS, trainer)
            digests = {name: sha256_file(temporary / name) for name in (CONFIG, WEIGHTS, TENSORS)}
            write_json(temporary / RECORD, _record(state, digests))
    point(run, state)
    return final


def load_state(folder: Path) -> State:
    """Return where the run stood at a checkpoint. Raises UserError.

    Where the best checkpoint is gone, the next evaluation chooses anew.
    """
    state, _ = read_record(folder)
    if state.best_step is not None and fault_of(folder.with_name(_name(state.best_step))) is not None:
        state.best_step, state.best_tau, state.num_worse = None, None, 0
    return state


def newest(run: Path) -> Path | None:
    """Return the newest checkpoint whose files are what was written, None where there is none at all.

    Damaged ones on the way to it are named on stderr. Raises UserError where all are damaged.
    """
    faults: list[str] = []
    for folder in reversed(_folders(run)):
        fault = fault_of(folder)
        if fault is None:
            if faults and is_main():
                print(f"{run}: going on from {folder.name}: {'; '.join(faults)}", file=sys.stderr)
            return folder
        faults.append(f"{folder.name} is damaged ({fault})")
    if faults:
        raise UserError(
            f"{run}: no checkpoint is whole: {'; '.join(faults)}; remove {run / FOLDER} to start anew"
        )
    return None


def fault_of(folder: Path) -> str | None:
    """Return what is wrong with a checkpoint, None where every file is what its record says."""
    try:
        _, digests = read_record(folder)
        for name, digest in digests.items():
            if not (folder / name).is_file():
                return f"{name} is missing"
            if sha256_file(folder / name) != digest:
                return f"{name} is not what was written"
    except (UserError, OSError) as error:
        return str(error).removeprefix(f"{folder}{os.sep}")
    return None


def read_record(folder: Path) -> tuple[State, dict[str, str]]:
    """Return trainer.json's position and its files' SHA-256. Raises UserError naming what is wrong."""
    where = folder / RECORD
    record = read_json(where, "choose another checkpoint")
    if record.get("format_version") != FORMAT_VERSION:
        raise UserError(f"{where}: format version {record.get('format_version')}, wanted {FORMAT_VERSION}")
    state, files = record.get("state"), record.get("files")
    if not isinstance(state, dict) or not isinstance(files, dict) or not {CONFIG, WEIGHTS} <= files.keys():
        raise UserError(f"{where}: lacks its state or its files; choose another checkpoint")
    for field in fields(State):
        value, wanted = state.get(field.name), str(field.type)
        fits = type(value) is int or ("float" in wanted and type(value) is float)
        if value is not None and fits and not 0 <= value < _TOO_LARGE:  # also NaN
            raise UserError(f"{where}: {field.name}: wanted a number of 0 or more, below 2**63")
        if not fits and not (value is None and "None" in wanted and field.name in state):
            raise UserError(f"{where}: {field.name}: got {value!r}, wanted {wanted}")
    for one, other in (("tau", "evaluated_step"), ("best_tau", "best_step")):
        if (state[one] is None) != (state[other] is None):
            raise UserError(
                f"{where}: got {one} {state[one]} and {other} {state[other]}, wanted both or none"
            )
    if state["step"] != _step(folder):
        raise UserError(f"{where}: step: got {state['step']}, wanted that of its folder, {folder.name}")
    return State(**{field.name: state[field.name] for field in fields(State)}), files


def prune(run: Path, keep_last: int, state: State) -> None:
    """Delete all but the newest `keep_last` checkpoints and the best."""
    best = folder_of(run, state.best_step) if state.best_step is not None else None
    for folder in [f for f in _folders(run) if (f / RECORD).is_file()][:-keep_last]:
        if folder != best:
            shutil.rmtree(folder, ignore_errors=True)


def sweep(run: Path, step: int) -> None:
    """Delete what killed writers left under temporary names, and damaged checkpoints past `step`."""
    for leftover in (run / FOLDER).glob(".step-*.tmp"):
        shutil.rmtree(leftover, ignore_errors=True)
    for folder in _folders(run):
        if _step(folder) > step:
            shutil.rmtree(folder, ignore_errors=True)


def point(run: Path, state: State) -> None:
    """Let ``last`` and ``best`` lead to the checkpoints that `state` names."""
    best = state.step if state.best_step is None else state.best_step
    for name, step in (("last", state.step), ("best", best)):
        if (folder_of(run, step) / RECORD).is_file():
            _link(run / name, Path(FOLDER) / _name(step))


def head_folder(path: str | Path) -> Path:
    """Return the head directory behind a run (its best) or a head directory; UserError otherwise."""
    if not Path(path).exists():
        raise UserError(f"{path}: no such folder; wanted a head or a run")
    for folder in (Path(path), Path(path) / "best"):
        if (folder / CONFIG).is_file() and any((folder / name).is_file() for name in FILES):
            return folder
    raise UserError(f"{path}: holds neither {CONFIG} and {WEIGHTS} nor a run's best; wanted a head or a run")


def read_head(folder: Path) -> Head:
    """Load a head with float32 weights, as training wants them."""
    return load_head(folder).float()


def folder_of(run: Path, step: int) -> Path:
    """Return the folder of the checkpoint after `step` steps."""
    return run / FOLDER / _name(step)


def _record(state: State, digests: dict[str, str]) -> dict[str, Any]:
    return {"format_version": FORMAT_VERSION, "state": asdict(state), "files": digests}


def _link(link: Path, to: Path) -> None:
    """Replace a symbolic link in one step."""
    temporary = link.with_name(f".{link.name}.{os.getpid()}.tmp")
    try:
        temporary.unlink(missing_ok=True)
        temporary.symlink_to(to)
        os.replace(temporary, link)
    except IsADirectoryError as error:
        raise UserError(f"{link}: a folder, wanted a link of the run's own; remove {link}") from error
    except OSError as error:
        raise os_error(link, error) from error
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)


def _name(step: int) -> str:
    return f"step-{step:06d}"


def _step(folder: Path) -> int:
    return int(folder.name.removeprefix("step-"))


def _folders(run: Path) -> list[Path]:
    """All named checkpoints, whole or not, by step."""
    found = [f for f in (run / FOLDER).glob("step-*") if re.fullmatch(r"step-[0-9]{6,18}", f.name)]
    return sorted((f for f in found if f.name == _name(_step(f))), key=_step)
