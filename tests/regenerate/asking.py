"""Conversations to ask, the command that asks them, and JSON lines to write and read."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

STOPS = [2, *range(40, 52)]  # many, so that a random model meets one now and then


def chats(count: int = 20) -> list[dict[str, Any]]:
    """Conversations of one to three turns, some with a system turn, all lengths mixed."""
    records = []
    for i in range(count):
        turns: list[dict[str, str]] = []
        if i % 4 == 1:
            turns.append({"role": "system", "content": f"Be kind {i}."})
        for turn in range(1 + i % 3):
            question = f"Question {i}.{turn}: " + "why is it so? " * (i * 7 % 5)
            turns += [
                {"role": "user", "content": question},
                {"role": "assistant", "content": "An old answer."},
            ]
        records.append({"id": f"c{i}", "messages": turns})
    return records


def asked_again(
    messages: list[dict[str, Any]], answer: Callable[[list[dict[str, Any]]], dict[str, Any] | None]
) -> list[dict[str, Any]]:
    """Answer turn by turn on the new history; where `answer` gives None, end before the unanswered turn."""
    said: list[dict[str, Any]] = []
    for message in messages:
        if message["role"] == "assistant":
            continue
        said.append(message)
        if message["role"] == "user":
            made = answer(said)
            if made is None:
                return said[:-1]
            said.append(made)
    return said


def write(path: Path, records: list[Any]) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def shown(out: Path) -> list[dict[str, Any]]:
    """Return what an output says of its conversations, without how it came about."""
    return [{"id": line["id"], "messages": line["messages"]} for line in read(out)]


def command(data: Path, target: Path | str, out: Path, *more: str) -> list[str]:
    """The command line of a process of its own; from its fourth word on it is that of ``eagle``."""
    named = (str(data), "--target", str(target), "--out", str(out))
    return [sys.executable, "-m", "eagle_cli.main", "regenerate", *named, *more]


def kill_after(answers: int, command: list[str], part: Path) -> None:
    """Run a real process, and kill it without a word once `part` holds more than so many lines."""
    child = subprocess.Popen(command, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 600
    while not (part.exists() and part.read_bytes().count(b"\n") > answers) and time.monotonic() < deadline:
        assert child.poll() is None
        time.sleep(0.002)
    child.kill()
    child.wait()
