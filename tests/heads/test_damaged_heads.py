"""A head directory whose config.json, index or weights are off is refused in one line, never a traceback."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from eagle_cli.main import main
from eagle_train.errors import UserError
from eagle_train.heads.disk import load_head, save_head
from eagle_train.heads.foreign import read_foreign
from eagle_train.heads.foreign_config import Told
from eagle_train.io.tensors import load_tensors, save_tensors

from .foreign_heads import (
    EAGLE1,
    EAGLE3,
    SPEC_FORGE,
    SPECULATORS,
    D,
    N,
    V,
    eagle1_tensors,
    eagle3_tensors,
    write,
)
from .small import small_head

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 128,
}
_ODD: list[tuple[str, Any]] = [
    *[("hidden_size", odd) for odd in ("32", -1, 1e9, 10**400, True, [32])],
    *[("num_attention_heads", odd) for odd in (0, "a")],
    ("num_key_value_heads", -2),
    ("num_key_value_heads", 0),
    ("vocab_size", "x"),
    ("draft_vocab_size", "x"),
    *[("head_dim", odd) for odd in (7, "x", 0)],
    *[("max_position_embeddings", odd) for odd in ("x", 0, -5)],
    *[("rms_norm_eps", odd) for odd in (0, -1e-5, float("nan"), "1e-5")],
    *[("rope_theta", odd) for odd in ("a", 0, float("inf"), float("nan"))],
    *[("rope_scaling", odd) for odd in (5, [1])],
    ("rope_parameters", 5),
    *[("layer_types", odd) for odd in (5, [["full_attention"]])],
    *[("architectures", odd) for odd in (5, [5])],
    *[("eagle_aux_hidden_state_layer_ids", odd) for odd in (5, [1, "5", 8], [1.5], [-1, 2, 3])],
    ("norm_before_residual", "false"),
    ("eagle_config", 5),
]


@pytest.mark.parametrize(("field", "odd"), _ODD)
def test_a_field_of_the_wrong_type_or_range_is_named_with_what_was_wanted(field, odd, tmp_path):
    words = rf"config\.json: {field} is .*, wanted "
    save_head(small_head("eagle3"), tmp_path / "ours")
    file = tmp_path / "ours" / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {field: odd}))
    with pytest.raises(UserError, match=words):
        load_head(tmp_path / "ours")
    folder = write(tmp_path / "theirs", {**EAGLE3, field: odd}, eagle3_tensors("midlayer"))
    with pytest.raises(UserError, match=words) as told:
        read_foreign(folder, num_target_layers=N)
    assert "\n" not in str(told.value)
    assert len(str(told.value)) < len(str(folder)) + 160


@pytest.mark.parametrize(
    ("config", "changes", "words"),
    [
        (SPECULATORS, {"speculators_config": 5}, "speculators_config is 5, wanted an object"),
        (
            SPECULATORS,
            {"speculators_config": {"verifier": 5}},
            r"speculators_config\.verifier is 5, wanted an",
        ),
        (SPECULATORS, {"speculators_model_type": ["eagle3"]}, r"speculators_model_type is \['eagle3'\]"),
        (
            SPECULATORS,
            {"transformer_layer_config": {"head_dim": 7}},
            r"transformer_layer_config\.head_dim is 7",
        ),
        (
            SPEC_FORGE,
            {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [[1]]}},
            r"eagle_config\.eagle_aux",
        ),
        (EAGLE3, {"hidden_size": 33}, "hidden_size is 33, wanted a multiple of the 4 attention heads"),
        (EAGLE3, {"rope_scaling": {"type": "linear", "factor": "x"}}, r"rope_scaling\.factor is 'x', wanted"),
        (EAGLE3, {"rope_scaling": {"type": "linear"}}, "RoPE settings .* cannot be computed"),
        (EAGLE3, {"rope_scaling": {"type": "longrope"}}, "longrope without original_max_position_embeddings"),
        (EAGLE3, {"eagle_train": 5}, "eagle_train is 5, wanted an object"),
    ],
)
def test_what_lies_deeper_or_fits_nothing_else_is_named_too(config, changes, words, tmp_path):
    tensors = eagle3_tensors("layers.0" if config is SPECULATORS else "midlayer")
    with pytest.raises(UserError, match=words):
        read_foreign(write(tmp_path / "head", {**config, **changes}, tensors), num_target_layers=N)


def test_json_nested_too_deeply_is_refused(tmp_path):
    folder = write(tmp_path / "head", EAGLE3, eagle3_tensors("midlayer"))
    (folder / "config.json").write_text('{"a":' + "[" * 200_000 + "]" * 200_000 + "}")
    with pytest.raises(UserError, match="nested too deeply"):
        read_foreign(folder)


def test_null_means_absent_in_a_head_of_ours(tmp_path):
    save_head(small_head("eagle3"), tmp_path)
    file = tmp_path / "config.json"
    value = json.loads(file.read_text())
    file.write_text(json.dumps(value | {"rms_norm_eps": None}))
    assert load_head(tmp_path).config.rms_norm_eps == 1e-6
    file.write_text(json.dumps(value | {"max_position_embeddings": None}))
    with pytest.raises(UserError, match="lacks max_position_embeddings"):
        load_head(tmp_path)


@pytest.mark.parametrize("scaling", [LLAMA3, {"type": "yarn", "factor": 4.0}])
def test_two_rotations_in_one_config_are_a_contradiction(scaling, tmp_path):
    both = {"rope_parameters": {"rope_type": "default", "rope_theta": 25000.0}, "rope_scaling": scaling}
    folder = write(tmp_path / "head", {**EAGLE3, **both}, eagle3_tensors("midlayer"))
    with pytest.raises(
        UserError, match=r"'default' in rope_parameters and '.*' in rope_scaling; correct one"
    ):
        read_foreign(folder)
    plain = read_foreign(folder, Told(rope_theta=5e5)).head.config.rope_parameters
    assert plain == {"rope_type": "default", "rope_theta": 5e5}
    agreeing = {"rope_parameters": {**LLAMA3, "rope_theta": 25000.0}, "rope_scaling": LLAMA3}
    read = read_foreign(write(tmp_path / "agree", {**EAGLE3, **agreeing}, eagle3_tensors("midlayer")))
    assert read.head.config.rope_parameters["rope_type"] == "llama3"
    agreeing["rope_scaling"] = {**LLAMA3, "factor": 4.0}
    with pytest.raises(UserError, match=r"factor is 8\.0 in rope_parameters and 4\.0 in rope_scaling"):
        read_foreign(write(tmp_path / "differ", {**EAGLE3, **agreeing}, eagle3_tensors("midlayer")))
    save_head(small_head("eagle3"), tmp_path / "ours")
    file = tmp_path / "ours" / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"rope_scaling": scaling}))
    with pytest.raises(UserError, match="'default' in rope_parameters"):
        load_head(tmp_path / "ours")


@pytest.mark.parametrize("base", [float("inf"), float("nan"), 0.0, -1.0])
def test_a_base_that_turns_nothing_is_refused(base):
    with pytest.raises(UserError, match=r"--rope-theta .*: wanted a positive number"):
        Told(rope_theta=base)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda ids: ids.float() + 0.5, r"d2t is torch\.float32 \[40\], wanted a row of integers"),
        (lambda ids: ids.bfloat16(), r"d2t is torch\.bfloat16"),
        (lambda ids: ids[None], r"d2t is torch\.int64 \[1, 40\]"),
        (lambda ids: torch.tensor(3), "d2t is a single number"),
        (lambda ids: ids + V, "d2t leads outside the target's 60 tokens"),
        (lambda ids: -torch.arange(D), "d2t names a target token twice"),
    ],
)
@pytest.mark.parametrize("t2d", [True, False])
def test_a_vocabulary_map_must_hold_each_of_the_targets_ids_once(change, words, t2d, tmp_path):
    tensors = eagle3_tensors("midlayer", t2d=t2d)
    tensors["d2t"] = change(tensors["d2t"])
    with pytest.raises(
        UserError, match=words if not (t2d and tensors["d2t"].ndim == 2) else "wanted d2t with"
    ):
        read_foreign(write(tmp_path / "head", EAGLE3, tensors))


@pytest.mark.parametrize("shape", [(3,), (2, 2, 2), (0, 32)])
def test_medusas_output_maps_are_matrices(shape, tmp_path):
    with pytest.raises(UserError, match=r"lm_heads are \[.*\], wanted matrices"):
        read_foreign(write(tmp_path / "head", {}, {"lm_heads.0.weight": torch.ones(shape)}))


def test_a_head_dim_that_follows_from_the_weights_must_be_even(tmp_path):
    tensors = eagle3_tensors("midlayer") | {"midlayer.self_attn.q_proj.weight": torch.ones(12, 64)}
    with pytest.raises(UserError, match="head_dim is 3, wanted an even number"):
        read_foreign(write(tmp_path / "head", {**EAGLE3, "head_dim": None}, tensors))


@pytest.mark.parametrize("odd", [float("nan"), float("inf")])
def test_weights_that_are_no_numbers_are_named(odd, tmp_path):
    tensors = eagle3_tensors("midlayer")
    tensors["midlayer.mlp.up_proj.weight"][0, 0] = odd
    with pytest.raises(UserError, match=r"head: midlayer\.mlp\.up_proj\.weight holds NaN or infinity"):
        read_foreign(write(tmp_path / "head", EAGLE3, tensors))
    deep = small_head("eagle3", num_hidden_layers=2)
    save_head(deep, tmp_path / "deep")
    tensors = load_tensors(tmp_path / "deep" / "model.safetensors")[0]
    tensors["layers.1.hidden_norm.weight"][0] = odd  # of the two names of one norm, that which SGLang reads
    save_tensors(tmp_path / "deep" / "model.safetensors", tensors)
    with pytest.raises(UserError, match=r"layers\.1\.hidden_norm\.weight holds NaN or infinity"):
        load_head(tmp_path / "deep")
    own = small_head("eagle3")
    with torch.no_grad():
        own.norm.weight[0] = odd
    save_head(own, tmp_path / "own")
    with pytest.raises(UserError, match=r"model\.safetensors: norm\.weight holds NaN or infinity"):
        load_head(tmp_path / "own")


@pytest.mark.parametrize(
    "table", [["a"], 5, {}, {"fc.weight": 5}, {"fc.weight": ["a"]}, {"a": "../b"}, {"a": ""}]
)
def test_an_index_must_name_files_of_its_folder(table, tmp_path):
    folder = write(tmp_path / "head", EAGLE1, eagle1_tensors())
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": table}))
    with pytest.raises(UserError, match=r"index\.json: (weight_map is|the file of) .*, wanted"):
        read_foreign(folder)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({5: torch.ones(2)}, "calls a tensor 5, wanted a head's state_dict"),
        ({"fc.weight": torch.eye(32).to_sparse()}, r"fc\.weight is sparse, nested or quantised"),
        ({"fc.weight": torch.ones(2, device="meta")}, r"fc\.weight is without data"),
        (
            {"fc.weight": torch.zeros(1).expand(200_000, 200_000)},  # 160 GB
            r"'fc\.weight' is \[200000, 200000\], but the file holds only 1 of these 40000000000 numbers",
        ),
        ({"fc.weight": torch.ones(3, 2)}, r"fc\.weight is \[3, 2\], wanted"),
        ({"fc.weight": 5}, "holds no table of tensors"),
        ({"fc.weight": torch.tensor(1.0)}, r"fc\.weight is a single number"),
        ({"fc.weight": Path("x")}, "cannot be read weights-only: it is damaged, or holds more than tensors"),
    ],
)
def test_a_pickle_must_hold_plain_tensors_by_name(change, words, tmp_path):
    folder = write(tmp_path / "head", EAGLE1, {})
    (folder / "model.safetensors").unlink()
    torch.save(eagle1_tensors() | change, folder / "pytorch_model.bin")
    with pytest.raises(UserError, match=words) as told:
        read_foreign(folder)
    assert not any(word in str(told.value) for word in ("\x1b", "\n", "weights_only"))


@pytest.mark.parametrize("checksums", [True, False])
def test_a_flipped_bit_in_a_pickle_is_seen_by_its_checksum(checksums, tmp_path):
    folder = write(tmp_path / "head", EAGLE1, {})
    (folder / "model.safetensors").unlink()
    tensors, file = eagle1_tensors(), folder / "pytorch_model.bin"
    torch.serialization.set_crc32_options(checksums)
    try:
        torch.save(tensors, file)
    finally:
        torch.serialization.set_crc32_options(True)
    read_foreign(folder)
    content = bytearray(file.read_bytes())
    content[content.index(tensors["fc.weight"].numpy().tobytes())] ^= 1
    file.write_bytes(content)
    if not checksums:  # nothing tells
        read_foreign(folder)
        return
    with pytest.raises(UserError, match=r"pytorch_model\.bin: damaged: part '.*/data/\d+' differs from its"):
        read_foreign(folder)


@pytest.mark.parametrize("width", [{"sliding_window": 0}, {"sliding_window": 0, "use_sliding_window": True}])
def test_a_window_of_no_rows_is_no_window(width, tmp_path):
    folder = write(tmp_path / "head", {**EAGLE3, **width}, eagle3_tensors("midlayer"))
    assert read_foreign(folder).head.config.sliding_window is None
    layered = {**EAGLE3, **width, "layer_types": ["sliding_attention"]}
    with pytest.raises(UserError, match="with sliding_window 0: not computed here"):
        read_foreign(write(tmp_path / "layered", layered, eagle3_tensors("midlayer")))


@pytest.mark.parametrize("ids", ["²,1,2", "9" * 5000, "1,,2", "-1,2,3", ""])
def test_layer_ids_are_numbers(ids, tmp_path, capsys):
    with pytest.raises(SystemExit) as exit_:
        main(["import", str(tmp_path), f"--layer-ids={ids}", "--out", str(tmp_path / "out")])
    assert exit_.value.code == 2
    said = capsys.readouterr().err
    assert "wanted numbers of layers, such as 2,16,29" in said
    assert len(said) < 200
