"""Help answers at once, without torch, and its examples can be copied."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import typer

from eagle_cli import main as main_module

_ROOT = Path(__file__).resolve().parents[2]
_COMMANDS = sorted(
    file.stem.rstrip("_")
    for file in (_ROOT / "cli").glob("*.py")
    if file.stem not in ("__init__", "main", "options", "eval_output")
)
_HEAVY = ("torch", "transformers", "datasets", "accelerate", "numpy", "safetensors", "huggingface_hub")
_SCRIPT = """
import json, sys
try:
    from eagle_cli.main import main
    main(sys.argv[1:])
except SystemExit as end:
    print(json.dumps({"code": end.code, "modules": sorted(sys.modules)}), file=sys.stderr)
"""


def _module(name: str):
    return getattr(main_module, name if hasattr(main_module, name) else f"{name}_")  # import is a keyword


def _examples(name: str) -> list[str]:
    lines = [line for line in _module(name).EXAMPLES.splitlines() if line.startswith("    ")]
    return [line.strip() for line in lines]


def _run(*arguments: str) -> tuple[str, int, set[str]]:
    """Return what ``eagle ARGUMENTS`` prints, its exit code and the modules it imported."""
    ran = subprocess.run(
        [sys.executable, "-c", _SCRIPT, *arguments],
        env={**os.environ, "COLUMNS": "160", "NO_COLOR": "1", "TERM": "dumb"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    end = json.loads(ran.stderr.splitlines()[-1])
    return ran.stdout, end["code"], set(end["modules"])


def test_every_command_file_is_a_command():
    group = typer.main.get_command(main_module.app)
    assert sorted(group.commands) == _COMMANDS  # type: ignore[attr-defined]
    assert all(name == _module(name).NAME for name in _COMMANDS)


def test_help_lists_every_command_and_imports_nothing_heavy():
    printed, code, modules = _run("--help")
    assert code == 0
    assert not modules.intersection(_HEAVY)
    for name in _COMMANDS:
        assert name in printed
        assert _module(name).HELP.split(".")[0] in printed


@pytest.mark.parametrize("name", _COMMANDS)
def test_help_of_a_command_shows_three_examples_and_imports_nothing_heavy(name):
    printed, code, modules = _run(name, "--help")
    assert code == 0
    assert not modules.intersection(_HEAVY)
    assert len(_examples(name)) == 3
    flat = "".join(printed.split())  # the terminal's width may break a line
    for example in _examples(name):
        assert "".join(example.split()) in flat


@pytest.mark.parametrize("name", _COMMANDS)
def test_examples_can_be_copied(name):
    """Each is this command with options that exist and values of their types."""
    command = typer.main.get_command(main_module.app).commands[name]  # type: ignore[attr-defined]
    for example in _examples(name):
        words = shlex.split(re.split(r" \| | && ", example)[-1])
        start = words.index("eagle_cli.main" if "eagle_cli.main" in words else "eagle")
        assert words[start + 1] == name
        context = command.make_context(name, words[start + 2 :])
        assert context.args == []


def test_an_unknown_command_and_option_exit_with_2():
    for arguments in (("exprot",), ("export", "--engin", "vllm")):
        ran = subprocess.run(
            [sys.executable, "-m", "eagle_cli.main", *arguments], capture_output=True, text=True, timeout=300
        )
        assert ran.returncode == 2
        assert "Traceback" not in ran.stderr
