"""What was written is read back, and refused by name where it is not the head or not what engines load."""

from __future__ import annotations

import json

import pytest
import torch

import eagle_train.export.export as export_module
from eagle_train.errors import UserError
from eagle_train.export.export import export
from eagle_train.export.layout import tensor_faults
from eagle_train.export.verify import verify
from eagle_train.heads.disk import load_config, load_head, save_head
from eagle_train.io.tensors import load_tensors, save_tensors
from eagle_train.io.text import write_json


@pytest.mark.parametrize(
    ("name", "change", "words"),
    [
        ("lm_head.weight", lambda tensor: None, "missing lm_head.weight"),
        ("d2t", lambda tensor: None, "missing d2t"),
        ("embed_tokens.weight", lambda tensor: torch.zeros(96, 32), "unexpected embed_tokens.weight"),
        ("fc.weight", lambda tensor: tensor[:, :64], r"fc.weight is \[32, 64\], wanted \[32, 96\]"),
        ("norm.weight", lambda tensor: tensor.bfloat16(), "norm.weight is bfloat16, wanted float32"),
        ("d2t", lambda tensor: tensor.int(), "d2t is int32, wanted int64"),
        ("norm.weight", lambda tensor: tensor / 0, "norm.weight holds values that are not finite"),
        ("norm.weight", lambda tensor: tensor * 1.001, "computes other logits"),
        ("d2t", lambda tensor: tensor.flip(0), "d2t"),
    ],
)
def test_damaged_tensors_are_refused_by_name(name, change, words, head_dir, tmp_path):
    out, source = tmp_path / "out", head_dir("eagle3", draft_vocab_size=40)
    export(source, out, engine="vllm", dtype="keep")
    head = load_head(source)
    assert verify(out, head, load_config(out), "vllm", torch.float32) == 0.0
    stored, _ = load_tensors(out / "model.safetensors")
    changed = change(stored.pop(name, None))
    if changed is not None:
        stored[name] = changed
    save_tensors(out / "model.safetensors", {key: tensor.clone() for key, tensor in stored.items()})
    with pytest.raises(UserError, match=words):
        verify(out, head, head.config, "vllm", torch.float32)


def test_tables_of_the_engines_differ_by_the_eagle1_bias(head_dir):
    source = head_dir("eagle1")
    stored, config = load_tensors(source / "model.safetensors")[0], load_config(source)
    assert tensor_faults(stored, config, "vllm", torch.float32) == []
    assert tensor_faults(stored, config, "sglang", torch.float32) == ["missing fc.bias"]
    stored["fc.bias"] = torch.zeros(32)
    assert tensor_faults(stored, config, "vllm", torch.float32) == ["unexpected fc.bias"]
    assert tensor_faults(stored, config, "sglang", torch.float32) == []


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("eagle_aux_hidden_state_layer_ids", [1, 3, 4], "eagle_aux_hidden_state_layer_ids"),
        ("eagle_config", {"use_aux_hidden_state": True}, "eagle_config"),
        ("draft_vocab_size", 96, "draft_vocab_size is 96, wanted 40"),
        ("rope_parameters", None, "rope_parameters"),
        ("target_hidden_size", None, "target_hidden_size is None, wanted 'absent'"),
        ("norm_before_residual", True, "norm_before_residual is True, wanted 'absent'"),
    ],
)
def test_a_damaged_config_is_refused_by_key(key, value, words, head_dir, tmp_path):
    out, source = tmp_path / "out", head_dir("eagle3", draft_vocab_size=40, llama3=True)
    export(source, out, engine="vllm", dtype="keep")
    head = load_head(source)
    config = json.loads((out / "config.json").read_text())
    write_json(out / "config.json", {**config, key: value})
    with pytest.raises(UserError, match=words):
        verify(out, head, head.config, "vllm", torch.float32)


def test_a_head_that_lost_a_tensor_on_the_way_never_appears(head_dir, tmp_path, monkeypatch):
    def forgetful(head, dtype=None):
        tensors = real(head, dtype)
        del tensors["lm_head.weight"]
        return tensors

    real = export_module.head_tensors
    monkeypatch.setattr(export_module, "head_tensors", forgetful)
    with pytest.raises(UserError, match=r"missing lm_head\.weight"):
        export(head_dir("eagle3"), tmp_path / "out", engine="sglang")
    assert [entry.name for entry in tmp_path.iterdir()] == ["head"]


def test_values_too_large_for_half_precision_are_refused(head_dir, tmp_path):
    source = head_dir("eagle3")
    head = load_head(source)
    with torch.no_grad():
        head.fc.weight[0, 0] = 1e5
    save_head(head, source)
    with pytest.raises(UserError, match=r"fc\.weight holds values that are not finite .*float16"):
        export(source, tmp_path / "out", engine="vllm", dtype="fp16")
    export(source, tmp_path / "out", engine="vllm", dtype="bf16")


def test_rounding_that_ruins_the_logits_is_refused(head_dir, tmp_path):
    source = head_dir("eagle3")
    head = load_head(source)
    with torch.no_grad():
        head.fc.weight.mul_(1e-6)  # harmless before the norm, but below what fp16 can tell apart
        head.midlayer.self_attn.o_proj.weight.mul_(1e-6)
        head.midlayer.mlp.down_proj.weight.mul_(1e-6)
    save_head(head, source)
    with pytest.raises(UserError, match="rounding to float16 changes the logits"):
        export(source, tmp_path / "out", engine="vllm", dtype="fp16")
    export(source, tmp_path / "out", engine="vllm", dtype="bf16")
