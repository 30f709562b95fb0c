"""Other places that follow a run, by name: wandb, wandb-offline, tensorboard, trackio."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

from eagle_train.errors import UserError, nearest

Values = dict[str, float]


class Tracker(Protocol):
    """Takes a step's figures."""

    def log(self, values: Values, step: int) -> None: ...
    def finish(self) -> None: ...


def open_tracker(name: str, run: Path, config: dict[str, Any]) -> Tracker:
    """Start following the run in folder `run`; `config` is its recipe. Raises UserError."""
    return _MAKERS[check_tracker(name)](run, config)


def check_tracker(name: str) -> str:
    """Return `name`, or raise UserError naming the known ones."""
    if name not in _MAKERS:
        known = ", ".join(_MAKERS)
        raise UserError(f"--track {name}: wanted one of {known}{nearest(name, _MAKERS)}")
    return name


def _wandb(run: Path, config: dict[str, Any], mode: Any = "online") -> Tracker:
    os.environ.setdefault("WANDB_SILENT", "true")
    wandb = _imported("wandb", "wandb")
    if mode == "online" and not (os.environ.get("WANDB_API_KEY") or wandb.api.api_key):
        print("wandb: no key found, logging offline; wandb sync sends it later", file=sys.stderr)
        mode = "offline"
    return wandb.init(project="eagle", name=run.resolve().name, dir=str(run), config=config, mode=mode)


def _wandb_offline(run: Path, config: dict[str, Any]) -> Tracker:
    return _wandb(run, config, mode="offline")


def _trackio(run: Path, config: dict[str, Any]) -> Tracker:
    trackio = _imported("trackio", "trackio")
    return trackio.init(project="eagle", name=run.resolve().name, config=config)


class _TensorBoard:
    """Events under run/tensorboard."""

    def __init__(self, run: Path, config: dict[str, Any]) -> None:
        self._writer = _imported("torch.utils.tensorboard", "tensorboard").SummaryWriter(
            str(run / "tensorboard")
        )
        self._writer.add_text("recipe", str(config))

    def log(self, values: Values, step: int) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, global_step=step)
        self._writer.flush()

    def finish(self) -> None:
        self._writer.close()


_MAKERS: dict[str, Callable[[Path, dict[str, Any]], Tracker]] = {
    "wandb": _wandb,
    "wandb-offline": _wandb_offline,
    "tensorboard": _TensorBoard,
    "trackio": _trackio,
}


def _imported(module: str, package: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise UserError(f"--track: {package} is not installed; pip install {package}") from error
