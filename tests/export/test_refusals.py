"""What an engine would load wrongly without a word is refused by name, and nothing half-made is left."""

from __future__ import annotations

import errno
import json
import os
import subprocess
from pathlib import Path

import pytest
import torch

import eagle_train.export.export as export_module
from eagle_train.errors import UserError
from eagle_train.export.export import export
from eagle_train.export.layout import tensor_faults
from eagle_train.export.refusals import refusals
from eagle_train.export.verify import verify
from eagle_train.heads.disk import build_head, load_config, load_head, save_head
from eagle_train.io import load_tensors, save_tensors, write_json


def _target(folder: Path, **fields: object) -> str:
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / "config.json", {"num_hidden_layers": 8, **fields})
    return str(folder)


def _only(folder: Path, *names: str) -> None:
    assert sorted(entry.name for entry in folder.iterdir()) == sorted(names)


@pytest.mark.parametrize(
    ("kind", "engine", "fields", "words"),
    [
        ("eagle3", "sglang", {"feature_layers": (0, 2, 4)}, r"SGLang cannot capture hs\[0\]"),
        ("eagle3", "eagle", {"num_hidden_layers": 2}, "num_hidden_layers is 2: EAGLE's repository loads one"),
        ("eagle3", "sglang", {"attention_bias": True}, "attention_bias: SGLang drops"),
        ("eagle3", "vllm", {"fc_bias": True}, r"fc\.bias: vLLM has no bias"),
        ("eagle1", "vllm", {"fc_bias": True}, r"fc\.bias is not zero: vLLM drops it silently"),
        ("eagle1", "sglang", {"attention_bias": True}, "attention_bias: SGLang drops"),
        ("eagle3", "sglang", {"norm_before_residual": True}, "norm_before_residual: SGLang does not"),
        ("eagle3", "eagle", {"norm_before_fc": True}, "norm_before_fc: EAGLE's repository does not compute"),
        ("eagle3", "vllm", {"qk_norm": True}, "qk_norm: vLLM has such heads in its other layout alone"),
        ("eagle3", "sglang", {"qk_norm": True}, "qk_norm: SGLang does not compute it"),
        ("eagle1", "vllm", {"qk_norm": True}, "qk_norm: vLLM does not compute it"),
        ("eagle3", "sglang", {"sliding_window": 9}, "sliding_window is 9: SGLang would attend to everything"),
        ("eagle1", "vllm", {"sliding_window": 9}, "sliding_window is 9: vLLM would attend to everything"),
        ("medusa", "sglang", {"medusa_heads": 2}, "kind medusa: SGLang runs no Medusa heads"),
        (
            "medusa",
            "vllm",
            {"medusa_heads": 2, "draft_vocab_size": 40},
            "draft_vocab_size is 40: vLLM's Medusa",
        ),
        ("eagle1", "speculators", {}, "kind eagle1: vLLM reads EAGLE-3 heads alone"),
        ("eagle3", "eagle", {"fc_norm": True}, "fc_norm: EAGLE's repository does not compute it"),
        ("eagle3", "eagle", {"norm_output": True}, "norm_output: EAGLE's repository"),
        ("eagle3", "eagle", {}, "goes by the target's depth, not known here; give --target"),
        ("eagle1", "eagle", {}, "head_dim is 16: EAGLE's repository takes hidden_size"),
        ("eagle1", "eagle", {"llama3": True}, "rope_type llama3: EAGLE's repository rotates without scaling"),
    ],
)
def test_what_an_engine_would_not_compute_is_refused(kind, engine, fields, words, head_dir, tmp_path):
    with pytest.raises(UserError, match=words):
        export(head_dir(kind, **fields), tmp_path / "out", engine=engine)
    _only(tmp_path, "head")


def test_last_state_is_refused_for_sglang_once_the_depth_is_known(head_dir, tmp_path):
    target = _target(tmp_path / "target")
    source = head_dir("eagle3", feature_layers=(2, 4, 8))
    with pytest.raises(UserError, match=r"SGLang cannot capture hs\[8\]"):
        export(source, tmp_path / "out", engine="sglang", target=target)
    made = export(source, tmp_path / "out", engine="vllm", target=target)
    assert list(made["serve"]) == ["vllm"]
    assert "Not for SGLang: feature_layers: SGLang cannot capture hs[8]" in (
        tmp_path / "out" / "README.md"
    ).read_text().replace("\n", " ")


def test_eagles_repository_captures_the_usual_layers_alone(head_dir, tmp_path):
    target = _target(tmp_path / "target")
    other = head_dir("eagle3", head_dim=8, feature_layers=(1, 4, 5), name="other")
    with pytest.raises(UserError, match=r"feature_layers \(1, 4, 5\): EAGLE's repository always captures"):
        export(other, tmp_path / "out", engine="eagle", target=target)
    export(head_dir("eagle3", head_dim=8), tmp_path / "out", engine="eagle", target=target)


def test_speculators_want_the_targets_hub_id(head_dir, tmp_path):
    source = head_dir("eagle3", target=str(tmp_path / "target"))
    with pytest.raises(UserError, match=r"names its target by hub id, .* give --target OWNER/NAME"):
        export(source, tmp_path / "out", engine="speculators")
    export(source, tmp_path / "out", engine="speculators", target="org/target")
    record = json.loads((tmp_path / "out" / "config.json").read_text())
    assert record["speculators_config"]["verifier"]["name_or_path"] == "org/target"


def test_targets_whose_ids_sglang_reads_by_their_first_take_the_usual_first_layer_alone(head_dir, tmp_path):
    target = _target(tmp_path / "target", model_type="deepseek_v3")
    other = head_dir("eagle3", feature_layers=(3, 4, 5), name="other")
    with pytest.raises(UserError, match="with deepseek_v3 targets SGLang takes ids for layers' inputs"):
        export(other, tmp_path / "out", engine="sglang", target=target)
    export(other, tmp_path / "out", engine="vllm", target=target)
    export(head_dir("eagle3"), tmp_path / "out", engine="sglang", target=target)  # hs[2] first


def test_first_layer_serves_in_vllm_alone(head_dir, tmp_path):
    export(head_dir("eagle3", feature_layers=(0, 2, 4)), tmp_path / "out", engine="vllm")
    written = json.loads((tmp_path / "out" / "config.json").read_text())
    assert written["eagle_aux_hidden_state_layer_ids"] == [0, 2, 4]
    assert written["eagle_config"] == {"use_aux_hidden_state": True}


def test_a_trained_fc_bias_is_kept_for_sglang(head_dir, tmp_path):
    source = head_dir("eagle1", fc_bias=True)
    export(source, tmp_path / "out", engine="sglang", dtype="keep")
    stored, _ = load_tensors(tmp_path / "out" / "model.safetensors")
    assert torch.equal(stored["fc.bias"], load_tensors(source / "model.safetensors")[0]["fc.bias"])


def test_a_head_without_layer_ids_takes_those_both_engines_would_take_or_is_refused(head_dir, tmp_path):
    source = head_dir("eagle3")
    config = json.loads((source / "config.json").read_text())
    config["eagle_train"]["feature_layers"] = []
    for key in ("eagle_aux_hidden_state_layer_ids", "eagle_config", "num_aux_hidden_states"):
        del config[key]
    write_json(source / "config.json", config)
    with pytest.raises(UserError, match="feature_layers: none recorded"):
        export(source, tmp_path / "out", engine="vllm")
    export(source, tmp_path / "out", engine="vllm", target=_target(tmp_path / "target"))
    written = json.loads((tmp_path / "out" / "config.json").read_text())
    assert written["eagle_aux_hidden_state_layer_ids"] == [2, 4, 5]


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
    _only(tmp_path, "head")


def test_a_full_disk_leaves_the_earlier_export_as_it_was(head_dir, tmp_path, monkeypatch):
    out = tmp_path / "out"
    export(head_dir("eagle3"), out, engine="vllm")
    before = {entry: entry.read_bytes() for entry in out.rglob("*") if entry.is_file()}
    newer = head_dir("eagle3", seed=1, name="newer")

    def full(path, content):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(export_module, "write_text", full)
    with pytest.raises(UserError, match="the disk is full"):
        export(newer, out, engine="vllm")
    assert {entry: entry.read_bytes() for entry in out.rglob("*") if entry.is_file()} == before
    _only(tmp_path, "head", "newer", "out")
    monkeypatch.undo()
    export(newer, out, engine="vllm")
    assert (out / "model.safetensors").read_bytes() != before[out / "model.safetensors"]
    _only(tmp_path, "head", "newer", "out")


def test_a_rename_that_fails_puts_the_earlier_export_back(head_dir, tmp_path, monkeypatch):
    source, out = head_dir("eagle3"), tmp_path / "out"
    export(source, out, engine="vllm")
    real = os.replace

    def replace(old, new):
        if Path(old).name == "new" and Path(new) == out:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        real(old, new)

    monkeypatch.setattr(os, "replace", replace)
    with pytest.raises(UserError, match="Input/output error"):
        export(source, out, engine="sglang")
    assert load_head(out).config.kind == "eagle3"
    _only(tmp_path, "head", "out")


def test_ctrl_c_leaves_nothing_behind(head_dir, tmp_path, monkeypatch):
    def interrupt(*arguments):
        raise KeyboardInterrupt

    monkeypatch.setattr(export_module, "verify", interrupt)
    with pytest.raises(KeyboardInterrupt):
        export(head_dir("eagle3"), tmp_path / "out", engine="vllm")
    _only(tmp_path, "head")


def test_leftovers_of_killed_exports_go_with_the_next_that_succeeds(head_dir, tmp_path):
    gone = subprocess.Popen(["true"])
    gone.wait()
    mine, other, living = (f".{name}.tmp" for name in (f"out.{gone.pid}", f"out.v2.{gone.pid}", "out.1"))
    for name in (mine, other, living):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text("half")
    export(head_dir("eagle3"), tmp_path / "out", engine="vllm")
    _only(tmp_path, "head", "out", other, living)


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


def test_what_stands_at_out_is_replaced_only_if_nothing_is_lost(head_dir, tmp_path):
    source, out = head_dir("eagle3"), tmp_path / "out"
    out.mkdir()
    export(source, out, engine="vllm")  # an empty folder
    export(source, out, engine="sglang")  # an earlier export
    (out / "notes.txt").write_text("mine")
    with pytest.raises(UserError, match=r"also holds notes\.txt"):
        export(source, out, engine="vllm")
    export(source, out, engine="vllm", overwrite=True)
    assert not (out / "notes.txt").exists()

    other = tmp_path / "other"
    other.mkdir()
    (other / "thesis.tex").write_text("years of work")
    with pytest.raises(UserError, match="exists and is no earlier export; choose another --out"):
        export(source, other, engine="vllm")
    assert (other / "thesis.tex").read_text() == "years of work"
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="is a file"):
        export(source, tmp_path / "file", engine="vllm", overwrite=True)


def test_overwrite_never_removes_the_source_or_what_holds_it(head_dir, tmp_path, monkeypatch):
    source = head_dir("eagle3")
    for out in (source, tmp_path):
        with pytest.raises(UserError, match="must not replace"):
            export(source, out, engine="vllm", overwrite=True)
    work = tmp_path / "work" / "deep"
    work.mkdir(parents=True)
    monkeypatch.chdir(work)
    with pytest.raises(UserError, match="must not replace"):
        export(source, work.parent, engine="vllm", overwrite=True)
    assert (source / "model.safetensors").is_file()


def test_unknown_engine_and_dtype_name_the_nearest(head_dir, tmp_path):
    source = head_dir("eagle3")
    with pytest.raises(UserError, match="did you mean 'sglang'"):
        export(source, tmp_path / "out", engine="sglan")
    with pytest.raises(
        UserError,
        match=r"--dtype bp16: wanted auto, fp32, bf16 or fp16; did you mean .*; keep stores it as trained",
    ):
        export(source, tmp_path / "out", engine="vllm", dtype="bp16")
    _only(tmp_path, "head")


def test_a_source_that_is_none_is_named(tmp_path):
    with pytest.raises(UserError, match="no such folder; wanted a run, a head directory"):
        export(tmp_path / "missing", tmp_path / "out", engine="vllm")
    with pytest.raises(UserError, match=r"holds neither config\.json and model\.safetensors nor a run"):
        export(tmp_path, tmp_path / "out", engine="vllm")


def test_refusals_of_a_plain_head_are_none(head_dir):
    for kind in ("eagle1", "eagle3"):
        head = build_head(load_config(head_dir(kind)))
        for engine in ("vllm", "sglang"):
            assert refusals(head, engine, 8) == []
