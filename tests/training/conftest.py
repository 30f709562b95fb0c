"""Short runs on the tiny target, and signals that reach them at a chosen moment."""

from __future__ import annotations

import dataclasses
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from eagle_train.config import Recipe
from eagle_train.errors import UserError
from eagle_train.io.tensors import load_tensors
from eagle_train.recipe_files import load_recipe
from eagle_train.shards.reader import Shards

EAGLE1 = ["head.kind=eagle1", "head.draft_vocab_size=null", "loss.noise=0.2"]


@pytest.fixture
def tiny() -> Callable[..., Recipe]:
    """Return the tiny recipe with overrides; `kind="eagle1"` makes it one of those."""

    def recipe(*overrides: str, kind: str = "eagle3") -> Recipe:
        return load_recipe("eagle3-tiny", [*(EAGLE1 if kind == "eagle1" else []), *overrides])

    return recipe


@pytest.fixture
def shards_of(tiny_shards_dir: Path, tiny_shards_eagle1_dir: Path) -> Callable[[str], Path]:
    """Return the tiny shards for a kind of head."""
    return {"eagle3": tiny_shards_dir, "eagle1": tiny_shards_eagle1_dir}.__getitem__


@pytest.fixture
def train_tiny(tmp_path: Path, tiny: Callable[..., Recipe], shards_of: Callable[[str], Path]) -> Callable:
    """Train the tiny recipe into tmp_path/NAME; return the summary."""
    from eagle_train.training.loop import train

    def run(name: str, *overrides: str, kind: str = "eagle3", **options: Any) -> dict[str, Any]:
        recipe = tiny(*overrides, kind=kind)
        return train(shards_of(kind), recipe, tmp_path / name, show=False, **options)

    return run


def refused(shards: Path, recipe: Recipe, out: Path, **options: Any) -> str:
    """Return the one line by which a run is refused that leaves nothing in `out`."""
    from eagle_train.training.loop import train

    with pytest.raises(UserError) as caught:
        train(shards, recipe, out, show=False, **options)
    assert "\n" not in str(caught.value)
    assert not (out / "recipe.yaml").exists()
    return str(caught.value)


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
    """Send this process SIGTERM when so many optimizer steps are done from now on; -1 for never."""
    from eagle_train.training.engine import Engine

    return _armed(monkeypatch, Engine, "update")


@pytest.fixture
def interrupt_in_evaluation(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Send this process SIGTERM in the midst of so many-th evaluation from now on."""
    from eagle_train.training import session

    return _armed(monkeypatch, session, "predict_chain")


def _armed(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str) -> Callable[[int], None]:
    original = getattr(owner, name)

    def arm(number: int) -> None:
        calls = 0

        def counting(*arguments: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls == number:
                os.kill(os.getpid(), signal.SIGTERM)
            return original(*arguments)

        monkeypatch.setattr(owner, name, counting)

    return arm


@pytest.fixture
def poison(monkeypatch: pytest.MonkeyPatch) -> Callable[[int, float], None]:
    """Let one row's features read as some value, such as NaN."""
    read = Shards.read

    def arm(row: int, value: float) -> None:
        def reading(self: Shards, number: int) -> Any:
            found = read(self, number)
            if number == row:
                found = dataclasses.replace(found, aux=torch.full_like(found.aux, value))
            return found

        monkeypatch.setattr(Shards, "read", reading)

    return arm


@pytest.fixture(scope="session")
def row_by_row(tmp_path_factory, tiny_rows_dir, tiny_target_dir) -> Callable[..., Path]:
    """Shards for a kind of head whose every row was a batch of its own: no sum depends on its neighbours."""
    made: dict[Any, Path] = {}

    def of(kind: str, label_top_k: int = 0) -> Path:
        from eagle_train.targets.extract import extract

        if (kind, label_top_k) not in made:
            made[kind, label_top_k] = out = tmp_path_factory.mktemp("row-by-row") / kind
            given: Any = {"codec": "fp32", "dtype": "fp32", "device": "cpu", "batch_tokens": 1, "show": False}
            extract(tiny_rows_dir, tiny_target_dir, out, features=kind, label_top_k=label_top_k, **given)
        return made[kind, label_top_k]

    return of
