"""Short runs on the tiny target."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from eagle_train.config import Recipe
from eagle_train.io import load_tensors
from eagle_train.recipe_files import load_recipe


@pytest.fixture
def tiny() -> Callable[..., Recipe]:
    """Return the tiny recipe with overrides."""
    return lambda *overrides: load_recipe("eagle3-tiny", overrides)


@pytest.fixture
def weights() -> Callable[[Path], dict[str, Any]]:
    """Return everything a checkpoint holds as tensors: head and optimizer."""

    def read(folder: Path) -> dict[str, Any]:
        return {
            **load_tensors(folder / "model.safetensors")[0],
            **load_tensors(folder / "trainer.safetensors")[0],
        }

    return read


@pytest.fixture
def interrupt_after(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Send this process SIGTERM when so many optimizer steps of this session are done."""
    from eagle_train.training import loop

    update = loop._update

    def arm(steps: int) -> None:
        done = 0

        def counting(session: Any) -> Any:
            nonlocal done
            result = update(session)
            done += 1
            if done == steps:
                os.kill(os.getpid(), signal.SIGTERM)
            return result

        monkeypatch.setattr(loop, "_update", counting)

    return arm
