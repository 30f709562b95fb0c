"""The README's commands, run as printed: real processes on a tiny target, from chats to a served head."""

from __future__ import annotations

import itertools
import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import typer

from eagle_cli import main as main_module

_ROOT = Path(__file__).resolve().parents[2]
_README = (_ROOT / "README.md").read_text()
_SHORTER = {
    "regenerate": ["--max-new-tokens", "64"],
    "extract": ["--dtype", "fp32"],
    "train": ["--set", "head.draft_vocab_size=128", "--set", "run.epochs=1"],
    "eval": ["--num-questions", "2", "--max-new-tokens", "8"],
}


def _own_model() -> list[list[str]]:
    """Return the words of each command in the README's block on one's own model."""
    blocks = re.findall(r"^```\n(.*?)^```$", _README, flags=re.DOTALL | re.MULTILINE)
    block = next(block for block in blocks if block.startswith("eagle regenerate"))
    return [shlex.split(line, comments=True) for line in block.splitlines()]


@pytest.fixture(scope="module")
def journey(tmp_path_factory, tiny_target_dir, tiny_conversations) -> tuple[Path, dict[str, str]]:
    """Run the block in a fresh folder; return the folder and what each command printed."""
    folder = tmp_path_factory.mktemp("journey")
    (folder / "chats.jsonl").write_bytes(tiny_conversations.read_bytes())
    printed = {}
    for _, command, *words in _own_model():
        named = [str(tiny_target_dir) if word == "YOUR_MODEL" else word for word in words]
        ran = subprocess.run(
            [sys.executable, "-m", "eagle_cli.main", command, *named, *_SHORTER.get(command, [])],
            cwd=folder,
            capture_output=True,
            text=True,
            timeout=300,
        )
        assert ran.returncode == 0, f"eagle {command}: {ran.stderr}"
        assert "Traceback" not in ran.stderr
        printed[command] = ran.stdout
    return folder, printed


@pytest.mark.slow
def test_the_block_leads_from_chats_to_a_head(journey):
    folder, printed = journey
    assert list(printed) == ["regenerate", "prepare", "inspect", "extract", "train", "eval", "export"]
    assert "24 read, 24 kept" in printed["prepare"]
    config = json.loads((folder / "head" / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLMEagle3"]
    assert (folder / "head" / "model.safetensors").is_file()


@pytest.mark.slow
def test_each_command_names_the_next_one(journey):
    _, printed = journey
    order = list(printed)
    for command, following in itertools.pairwise(order):
        if command == "eval":  # it names export for a head that has learned
            tau = float(re.search(r"acceptance length \(tau\) +([\d.]+)", printed["eval"])[1])
            assert (f"eagle {following}" in printed["eval"]) == (tau >= 1.05)
        elif command != "inspect":
            expected = "extract" if following == "inspect" else following
            assert f"eagle {expected}" in printed[command], command


@pytest.mark.slow
def test_the_answers_were_unchanged(journey):
    _, printed = journey
    assert "equal to plain decoding on every prompt" in printed["eval"]


def test_every_command_line_in_the_readme_can_be_typed():
    """Commands and options exist, values have their types; so in the pages of docs/."""
    group = typer.main.get_command(main_module.app)
    text = "\n".join([_README, *(page.read_text() for page in (_ROOT / "docs").glob("*.md"))])
    lines = re.findall(r"^(?:    )?(eagle [a-z]+ .*?)(?:  +#.*)?$", text, flags=re.MULTILINE)
    assert len(lines) >= len(_own_model())
    for line in lines:
        _, name, *words = shlex.split(line)
        context = group.commands[name].make_context(name, words)  # type: ignore[attr-defined]
        assert context.args == []
