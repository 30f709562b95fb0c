"""A tiny target whose answers end by themselves, conversations to ask it, and a server process."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from eagle_train.regenerate import server as module
from eagle_train.targets.load import Target, load_target

from .asking import STOPS, chats
from .local import one_by_one


@pytest.fixture(scope="session")
def ending_target_dir(
    tmp_path_factory: pytest.TempPathFactory, make_tiny_target: Callable[..., Path]
) -> Path:
    """A random Llama of 4 layers with many end-of-sequence ids."""
    folder = make_tiny_target(tmp_path_factory.mktemp("target") / "ending", num_layers=4)
    file = folder / "generation_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "eos_token_id": STOPS}))
    return folder


@pytest.fixture(scope="session")
def target(ending_target_dir: Path) -> Target:
    return load_target(ending_target_dir, dtype="fp32", device="cpu")


@pytest.fixture(scope="session")
def expected(target: Target) -> list[dict[str, Any]]:
    """What the target answers to `chats()` one by one, without those that stay empty."""
    found = [{"id": record["id"], "messages": one_by_one(target, record)} for record in chats()]
    return [record for record in found if record["messages"]]


@pytest.fixture
def start_server(tmp_path: Path) -> Iterator[Callable[..., tuple[str, Path]]]:
    """Start ``chat_server.py`` with options; return its URL and its log."""
    running = []

    def start(*options: str) -> tuple[str, Path]:
        log = tmp_path / f"server-{len(running)}.log"
        command = [sys.executable, str(Path(__file__).with_name("chat_server.py")), "--log", str(log)]
        process = subprocess.Popen([*command, *options], stdout=subprocess.PIPE, text=True)
        running.append(process)
        assert process.stdout is not None
        return f"http://127.0.0.1:{int(process.stdout.readline())}", log

    yield start
    for process in running:
        process.kill()
        process.wait()
        process.stdout.close()  # type: ignore[union-attr]


@pytest.fixture(autouse=True)
def _short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Between the tries of a request."""
    monkeypatch.setattr(module, "_FIRST_PAUSE", 0.01)
