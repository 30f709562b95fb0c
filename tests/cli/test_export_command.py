"""``eagle export`` as typed: what it prints, its exit codes, its JSON."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest
import torch

from eagle_cli.main import main
from eagle_cli.options import eval_command
from eagle_train.heads.config import HeadConfig
from eagle_train.heads.disk import build_head, save_head


@pytest.fixture
def head(tmp_path, monkeypatch) -> Path:
    """A tiny EAGLE-3 head in ``head/`` of the current folder."""
    target = {
        "hidden_size": 32,
        "num_attention_heads": 4,
        "num_hidden_layers": 8,
        "intermediate_size": 48,
        "vocab_size": 96,
        "max_position_embeddings": 512,
        "rope_theta": 10000.0,
    }
    torch.manual_seed(0)
    monkeypatch.chdir(tmp_path)
    save_head(build_head(HeadConfig.for_target(target, "eagle3", target="org/target")), "head")
    return Path("head")


def _run(*arguments: str) -> int:
    with pytest.raises(SystemExit) as exit_:
        main(["export", *arguments])
    code = exit_.value.code
    assert isinstance(code, int)
    return code


def test_it_says_what_it_made_how_to_serve_it_and_what_comes_next(head, capsys):
    assert _run("head", "--engine", "vllm", "--out", "served/", "--dtype", "bf16") == 0
    lines = capsys.readouterr().out.splitlines()
    assert re.fullmatch(r"served: eagle3 head for vllm and sglang, bfloat16, \d+\.\d KiB", lines[0])
    assert lines[1].startswith("read back: every tensor as the engine wants it; logits within 0.")
    assert lines[2].startswith(
        "serve with vllm: vllm serve org/target --dtype bfloat16 --speculative-config "
    )
    assert json.loads(shlex.split(lines[2])[-1])["model"] == "served"
    assert lines[3].startswith("serve with sglang: python -m sglang.launch_server --model-path org/target ")
    assert lines[4] == f"next: {eval_command('served', 'org/target')}"
    assert len(lines) == 5


def test_the_card_says_what_stands_in_for_a_local_target(head, capsys):
    Path("models/smol").mkdir(parents=True)
    config = json.loads(Path("head/config.json").read_text())
    for named, told in (("models/smol", True), ("org/target", False)):
        config["eagle_train"]["target"] = named
        Path("head/config.json").write_text(json.dumps(config))
        assert _run("head", "--engine", "vllm", "--out", "served") == 0
        card = Path("served/README.md").read_text()
        assert f"vllm serve {'smol' if told else named} " in card
        line = "`smol` is the target's name where this was made: its hub id or directory goes there."
        assert (line in card) == told


def test_kept_weights_are_equal_to_the_bit(head, capsys):
    assert _run("head", "--engine", "sglang", "--out", "served") == 0
    assert "logits equal to the bit" in capsys.readouterr().out


def test_json_is_pure_and_names_everything(head, capsys):
    assert _run("head", "--engine", "sglang", "--out", "served", "--json") == 0
    made = json.loads(capsys.readouterr().out)
    assert made["out"] == "served"
    assert made["engine"] == "sglang"
    assert made["kind"] == "eagle3"
    assert made["dtype"] == "float32"
    assert made["logits_changed_by"] == 0.0
    assert made["target"]["name"] == "org/target"
    assert list(made["serve"]) == ["sglang", "vllm"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("missing", "--engine", "vllm", "--out", "served"), "missing: no such folder"),
        (("head", "--engine", "vlm", "--out", "served"), "did you mean 'vllm'?"),
        (("head", "--engine", "vllm", "--out", "head"), "must not replace; choose another --out"),
        (("head", "--engine", "vllm", "--out", "taken"), "is no earlier export"),
    ],
)
def test_what_the_user_must_change_is_one_line_and_exit_2(arguments, words, head, capsys):
    Path("taken").mkdir()
    (Path("taken") / "thesis.tex").write_text("")
    assert _run(*arguments) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith("error: ")
    assert words in printed.err
    assert printed.err.count("\n") == 1
    assert not Path("served").exists()
