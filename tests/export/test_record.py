"""Which dtype an export takes, what it says about itself, and that equal heads give equal bytes."""

from __future__ import annotations

import json
import shlex
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import yaml

from eagle_train.export.card import is_hub_id, serve_command
from eagle_train.export.export import export
from eagle_train.export.folder import made_by
from eagle_train.export.verify import reference_outputs
from eagle_train.heads.disk import load_head
from eagle_train.io.checksums import sha256_file
from eagle_train.io.text import write_json


def _target(folder: Path, value: dict) -> str:
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / "config.json", value)
    return str(folder)


@pytest.mark.parametrize(
    ("config", "asked", "stored", "served"),
    [
        ({"dtype": "bfloat16"}, "auto", torch.bfloat16, "bfloat16"),
        ({"torch_dtype": "float16"}, "auto", torch.float16, "float16"),
        ({"dtype": "float32"}, "auto", torch.float32, "float32"),
        ({"text_config": {"dtype": "bfloat16", "num_hidden_layers": 8}}, "auto", torch.bfloat16, "bfloat16"),
        ({"torch_dtype": "bfloat16", "text_config": {}}, "auto", torch.bfloat16, "bfloat16"),
        ({"dtype": "float8_e4m3fn"}, "auto", torch.float32, "float32"),
        ({}, "auto", torch.float32, "float32"),
        ({"dtype": "bfloat16"}, "keep", torch.float32, "bfloat16"),
        ({"dtype": "bfloat16"}, "fp16", torch.float16, "bfloat16"),
        ({}, "bf16", torch.bfloat16, "bfloat16"),
    ],
)
def test_auto_dtype_is_the_targets_own_and_serving_names_it(
    config, asked, stored, served, head_dir, tmp_path
):
    target = _target(tmp_path / "target", config)
    made = export(head_dir("eagle3"), tmp_path / "out", engine="vllm", dtype=asked, target=target)
    head = load_head(tmp_path / "out")
    assert {value.dtype for value in head.parameters()} == {stored}
    assert head.config.dtype == str(stored).removeprefix("torch.") == made["dtype"]
    assert all(f"--dtype {served} " in command for command in made["serve"].values())


def test_a_target_out_of_sight_keeps_the_trained_dtype(head_dir, tmp_path):
    for target in ("org/never-downloaded", "/no/such/folder", ""):
        out = tmp_path / f"out-{len(target)}"
        export(head_dir("eagle3", target=target), out, engine="vllm")
        assert load_head(out).config.dtype == "float32"


def test_scoring_the_export_scores_the_trained_head_cast_to_the_target(head_dir, tmp_path):
    source = head_dir("eagle3", draft_vocab_size=40)
    export(source, tmp_path / "out", engine="vllm", dtype="bf16")
    trained, exported = load_head(source).bfloat16(), load_head(tmp_path / "out")
    assert torch.equal(reference_outputs(trained), reference_outputs(exported))
    assert torch.equal(trained.draft_ids, exported.draft_ids)
    assert torch.equal(trained.in_draft, exported.in_draft)


def test_every_tensor_and_switch_bears_on_the_reference_outputs(head_dir):
    for kind, fields in (("eagle1", {}), ("eagle3", {"fc_norm": True, "norm_output": True})):
        source = head_dir(kind, **fields, name=kind)
        before = reference_outputs(load_head(source))
        assert not torch.equal(before[0], before[1])
        for name, _ in load_head(source).named_parameters():
            head = load_head(source)
            with torch.no_grad():
                head.get_parameter(name).mul_(1.01)
            assert not torch.equal(reference_outputs(head), before), name
        if kind == "eagle3":
            head = load_head(source)
            head.config = replace(head.config, norm_output=False)
            assert not torch.equal(reference_outputs(head), before)


@pytest.mark.parametrize("kind", ["eagle1", "eagle3"])
def test_equal_heads_give_equal_bytes(kind, head_dir, tmp_path):
    source = head_dir(kind)
    for folder in ("a", "b"):
        export(source, tmp_path / folder / "out", engine="sglang", dtype="bf16")
    out = tmp_path / "a" / "out"
    names = sorted(str(file.relative_to(out)) for file in out.rglob("*") if file.is_file())
    assert len(names) == 5
    for name in names:
        first, second = (tmp_path / folder / "out" / name for folder in ("a", "b"))
        assert first.read_bytes() == second.read_bytes(), name


def test_whoever_may_read_the_config_may_read_the_weights(head_dir, tmp_path):
    export(head_dir("eagle3"), tmp_path / "out", engine="vllm")
    files = [entry for entry in (tmp_path / "out").rglob("*") if entry.is_file()]
    modes = {entry.stat().st_mode & 0o777 for entry in files}
    assert len(modes) == 1


def test_provenance_names_what_the_export_was_made_from(head_dir, tmp_path):
    source, out = head_dir("eagle3"), tmp_path / "out"
    target = _target(tmp_path / "target", {"dtype": "bfloat16", "num_hidden_layers": 8})
    export(source, out, engine="vllm", target=target)
    record = json.loads((out / "provenance.json").read_text())
    change = record.pop("logits_changed_by")
    assert 0 < change < 0.01
    assert record.pop("tool_version")
    assert record == {
        "format_version": 1,
        "made_by": "eagle export",
        "engines": ["vllm", "sglang"],
        "refused": {},
        "kind": "eagle3",
        "dtype": "bfloat16",
        "guesses": 3,
        "target": {"name": target, "revision": None, "fingerprint": None, "dtype": "bfloat16"},
        "source": {
            "run": None,
            "head": "head",
            "weights_sha256": sha256_file(source / "model.safetensors"),
        },
        "recipe": None,
        "data": None,
        "acceptance": None,
        "weights_sha256": sha256_file(out / "model.safetensors"),
    }
    assert made_by(out) == "eagle export"
    assert made_by(source) is None


def test_serve_commands_are_those_of_the_engines():
    words = shlex.split(serve_command("vllm", "eagle3", "org/target", "my head", "bfloat16"))
    assert words[:6] == ["vllm", "serve", "org/target", "--dtype", "bfloat16", "--speculative-config"]
    assert json.loads(words[6]) == {"method": "eagle3", "model": "my head", "num_speculative_tokens": 3}
    assert (
        json.loads(shlex.split(serve_command("vllm", "eagle1", "t", "h", "float16"))[6])["method"] == "eagle"
    )
    assert serve_command("sglang", "eagle3", "org/target", "head", "bfloat16") == (
        "python -m sglang.launch_server --model-path org/target --dtype bfloat16 "
        "--speculative-algorithm EAGLE3 --speculative-draft-model-path head "
        "--speculative-num-steps 3 --speculative-eagle-topk 1 --speculative-num-draft-tokens 4"
    )
    assert "--speculative-algorithm EAGLE " in serve_command("sglang", "eagle1", "t", "h", "float16")
    code = shlex.split(serve_command("eagle", "eagle3", "org/target", "my head", "float16"))[2]
    assert code.endswith(
        "EaModel.from_pretrained(use_eagle3=True, base_model_path='org/target', ea_model_path='my head', "
        "torch_dtype=torch.float16)"
    )


@pytest.mark.parametrize(
    ("kind", "engine", "engines"),
    [
        ("eagle3", "vllm", {"vllm", "sglang"}),
        ("eagle3", "sglang", {"vllm", "sglang"}),
        ("eagle1", "vllm", {"vllm"}),
        ("eagle1", "sglang", {"sglang"}),
    ],
)
def test_the_card_has_front_matter_and_a_command_for_each_engine_that_loads_it(
    kind, engine, engines, head_dir, tmp_path
):
    made = export(head_dir(kind), tmp_path / "out", engine=engine)
    card = (tmp_path / "out" / "README.md").read_text()
    _, front, body = card.split("---\n", 2)
    assert yaml.safe_load(front) == {
        "base_model": "org/target",
        "pipeline_tag": "text-generation",
        "tags": ["speculative-decoding", "eagle", kind],
    }
    assert set(made["serve"]) == engines
    for other in ("vllm", "sglang"):
        command = serve_command(other, kind, "org/target", "out", "float32")
        assert (f"```\n{command}\n```" in body) == (other in engines)
    assert str(tmp_path) not in card


def test_a_local_target_is_named_after_its_folder_unless_given(head_dir, tmp_path):
    target = _target(tmp_path / "small-target", {"dtype": "float32"})
    source = head_dir("eagle3", target=target)
    made = export(source, tmp_path / "out", engine="vllm")
    card = (tmp_path / "out" / "README.md").read_text()
    assert "EAGLE-3 draft head for small-target\n" in card
    assert "vllm serve small-target " in card
    for file in ("README.md", "provenance.json", "config.json"):
        assert str(tmp_path) not in (tmp_path / "out" / file).read_text()
    assert made["target_path"] == target
    assert f"vllm serve {target} " in made["serve"]["vllm"]  # what is printed can be typed here
    made = export(source, tmp_path / "out", engine="vllm", target="org/target")
    assert made["target_path"] is None
    assert "vllm serve org/target " in (tmp_path / "out" / "README.md").read_text()


def test_a_head_that_names_no_target_says_what_to_put(head_dir, tmp_path):
    made = export(head_dir("eagle3", target=""), tmp_path / "out", engine="vllm")
    card = (tmp_path / "out" / "README.md").read_text()
    assert "base_model" not in card
    assert "vllm serve TARGET " in card
    assert "`TARGET` stands for the hub id or directory of the target." in card
    assert "vllm serve TARGET " in made["serve"]["vllm"]


def test_hub_ids_are_told_from_paths(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "org" / "local").mkdir(parents=True)
    assert is_hub_id("meta-llama/Llama-3.1-8B-Instruct")
    assert not any(map(is_hub_id, ("", "gpt2", "./org/name", "/data/x", "a/b/c", "org/local", "../x")))
