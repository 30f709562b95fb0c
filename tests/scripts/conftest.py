"""Scripts as modules."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import pytest


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], ModuleType]]:
    """Load scripts/NAME.py, which finds its neighbours as when it is run."""
    loaded: list[str] = []
    folder = Path(__file__).parents[2] / "scripts"
    monkeypatch.syspath_prepend(folder)

    def load(name: str) -> ModuleType:
        file = folder / f"{name}.py"
        spec = importlib.util.spec_from_file_location(name, file)
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        loaded.append(name)
        spec.loader.exec_module(module)
        return module

    yield load
    for name in loaded:
        del sys.modules[name]
