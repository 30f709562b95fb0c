"""What an engine would not compute as the head does is refused by the setting's name."""

from __future__ import annotations

import json
import shlex
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from eagle_train.errors import UserError
from eagle_train.export.export import export
from eagle_train.export.refusals import refusals
from eagle_train.heads.config import default_layers
from eagle_train.heads.disk import build_head, load_config, save_head
from eagle_train.io.tensors import load_tensors
from eagle_train.io.text import write_json
from eagle_train.recipe_files import load_recipe
from eagle_train.training.build import config_on

TARGET = {  # whose heads EAGLE's repository can hold
    "hidden_size": 32,
    "num_attention_heads": 4,
    "num_hidden_layers": 8,
    "intermediate_size": 48,
    "vocab_size": 96,
    "rope_theta": 10000.0,
}


def _target(folder: Path, **fields: object) -> str:
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / "config.json", {"num_hidden_layers": 8, **fields})
    return str(folder)


@pytest.mark.parametrize(
    ("kind", "engine", "fields", "words"),
    [
        ("eagle3", "sglang", {"feature_layers": (0, 2, 4)}, r"SGLang cannot capture hs\[0\]"),
        ("eagle3", "eagle", {"num_hidden_layers": 2}, "num_hidden_layers is 2: EAGLE's repository loads one"),
        ("eagle3", "sglang", {"feature_layers": (4,)}, r"feature_layers \(4,\): SGLang leaves out fc"),
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
    assert [entry.name for entry in tmp_path.iterdir()] == ["head"]


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


def test_unknown_engine_and_dtype_name_the_nearest(head_dir, tmp_path):
    source = head_dir("eagle3")
    with pytest.raises(UserError, match="did you mean 'sglang'"):
        export(source, tmp_path / "out", engine="sglan")
    with pytest.raises(
        UserError,
        match=r"--dtype bp16: wanted auto, fp32, bf16 or fp16; did you mean .*; keep stores it as trained",
    ):
        export(source, tmp_path / "out", engine="vllm", dtype="bp16")
    assert [entry.name for entry in tmp_path.iterdir()] == ["head"]


def test_a_source_that_is_none_is_named(tmp_path):
    with pytest.raises(UserError, match="no such folder; wanted a run, a head directory"):
        export(tmp_path / "missing", tmp_path / "out", engine="vllm")
    with pytest.raises(UserError, match=r"holds neither config\.json and model\.safetensors nor a run"):
        export(tmp_path, tmp_path / "out", engine="vllm")


@pytest.mark.parametrize(
    ("kind", "engine", "settings"),
    [
        ("eagle3", "eagle", ["head.fc_norm=true", "head.norm_output=true", "head.num_hidden_layers=2"]),
        ("eagle3", "eagle", ["head.norm_before_fc=true", "head.layer_ids=[1,4,5]"]),
        ("eagle3", "sglang", ["head.norm_before_residual=true", "head.layer_ids=[0,4]"]),
        ("eagle3", "sglang", ["head.layer_ids=[8]", "head.qk_norm=true"]),
        ("eagle1", "vllm", ["head.qk_norm=true"]),
        ("medusa", "vllm", ["head.draft_vocab_size=40"]),
    ],
)
def test_a_head_of_the_recipe_settings_that_a_refusal_names_is_taken(kind, engine, settings, tmp_path):
    def head(overrides):
        recipe = load_recipe(
            kind, ["head.draft_vocab_size=null", *overrides] if kind == "eagle3" else overrides
        )
        ids = recipe.head.layer_ids or default_layers(8)
        config = replace(config_on(recipe, TARGET, 96, ids, "here"), target="org/target")
        return build_head(config, torch.arange(40) if config.reduced_vocabulary else None)

    save_head(head(settings), tmp_path / "head")
    target = _target(tmp_path / "target")
    with pytest.raises(UserError) as caught:
        export(tmp_path / "head", tmp_path / "out", engine=engine, target=target)
    named = shlex.split(str(caught.value).partition("; train a head for it with ")[2])[1::2]
    assert {one.partition("=")[0] for one in named} == {one.partition("=")[0] for one in settings}
    save_head(head([*settings, *named]), tmp_path / "mended")
    export(tmp_path / "mended", tmp_path / "out", engine=engine, target=target)


@pytest.mark.parametrize(
    ("kind", "engine", "fields", "end"),
    [
        (
            "eagle3",
            "sglang",
            {"sliding_window": 9},
            "everything; train a head for it anew, without --init-from",
        ),
        (
            "eagle3",
            "sglang",
            {"attention_bias": True, "qk_norm": True},
            "; train a head for it anew, without --init-from, with --set head.qk_norm=false",
        ),
        ("eagle1", "eagle", {}, "; no recipe makes a head of this target for it: choose another --engine"),
        ("eagle3", "vllm", {"qk_norm": True}, "use --engine speculators"),
    ],
)
def test_a_refusal_ends_in_what_to_do(kind, engine, fields, end, head_dir, tmp_path):
    with pytest.raises(UserError) as caught:
        export(head_dir(kind, **fields), tmp_path / "out", engine=engine)
    assert str(caught.value).endswith(end)


def test_refusals_of_a_plain_head_are_none(head_dir):
    for kind in ("eagle1", "eagle3"):
        head = build_head(load_config(head_dir(kind)))
        for engine in ("vllm", "sglang"):
            assert refusals(head, engine, 8) == []
