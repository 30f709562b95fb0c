"""Heads on disk: the layout that engines load, read back bit for bit, refused when anything is off."""

from __future__ import annotations

import json

import pytest
import torch

from eagle_train.errors import UserError
from eagle_train.heads.disk import load_config, load_head, save_head
from eagle_train.io.tensors import load_tensors, save_tensors

from .small import small_frozen, small_head

LAYER = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj")
MLP = ("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")


def test_eagle3_file_holds_exactly_what_engines_load(tmp_path):
    head = small_head("eagle3", fc_norm=True)
    save_head(head, tmp_path)
    stored, _ = load_tensors(tmp_path / "model.safetensors")
    norms = ("input_layernorm", "hidden_norm", "post_attention_layernorm")
    wanted = {f"midlayer.{name}.weight" for name in (*LAYER, *MLP, *norms)}
    wanted |= {"fc.weight", "norm.weight", "lm_head.weight", "d2t", "t2d"}
    wanted |= {f"fc_norm.{i}.weight" for i in range(3)}
    assert set(stored) == wanted
    assert stored["fc.weight"].shape == (32, 96)
    assert stored["midlayer.self_attn.q_proj.weight"].shape == (64, 64)
    assert stored["midlayer.self_attn.k_proj.weight"].shape == (32, 64)
    assert stored["lm_head.weight"].shape == (40, 32)
    assert stored["t2d"].dtype == torch.bool
    assert stored["d2t"].dtype == torch.int64
    assert stored["t2d"].nonzero().flatten().tolist() == (stored["d2t"] + torch.arange(40)).tolist()


def test_eagle1_file_holds_exactly_what_engines_load(tmp_path):
    save_head(small_head("eagle1"), tmp_path)
    stored, _ = load_tensors(tmp_path / "model.safetensors")
    wanted = {f"layers.0.{name}.weight" for name in (*LAYER, *MLP, "post_attention_layernorm")}
    assert set(stored) == wanted | {"fc.weight"}


def test_further_layers_have_their_own_numbers_and_their_input_norm_under_both_engines_names(tmp_path):
    head = small_head("eagle3", num_hidden_layers=3)
    save_head(head, tmp_path)
    stored, _ = load_tensors(tmp_path / "model.safetensors")
    norms = ("input_layernorm", "hidden_norm", "post_attention_layernorm")
    further = {name for name in stored if name.startswith("layers.")}
    assert further == {f"layers.{i}.{name}.weight" for i in (1, 2) for name in (*LAYER, *MLP, *norms)}
    for i, layer in head.layers.items():
        for name in ("input_layernorm", "hidden_norm"):
            assert torch.equal(stored[f"layers.{i}.{name}.weight"], layer.input_layernorm.weight)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda x: x.pop("layers.1.hidden_norm.weight"), r"missing layers\.1\.hidden_norm\.weight"),
        (lambda x: x.pop("layers.1.input_layernorm.weight"), r"missing layers\.1\.input_layernorm\.weight"),
        (
            lambda x: x["layers.1.hidden_norm.weight"].mul_(2),
            "which SGLang reads, is not layers.1.input_layer",
        ),
    ],
)
def test_an_input_norm_that_one_engine_would_read_otherwise_is_refused(tmp_path, change, words):
    save_head(small_head("eagle3", num_hidden_layers=2), tmp_path)
    _spoil(tmp_path, change)
    with pytest.raises(UserError, match=words):
        load_head(tmp_path)


def test_an_unreduced_vocabulary_writes_no_maps(tmp_path):
    save_head(small_head("eagle3", draft_vocab_size=60), tmp_path)
    stored, _ = load_tensors(tmp_path / "model.safetensors")
    assert not {"d2t", "t2d"} & set(stored)
    assert load_config(tmp_path).draft_vocab_size == 60


@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        ("eagle3", {}),
        ("eagle3", {"num_hidden_layers": 2, "norm_output": True}),
        ("eagle1", {"fc_bias": True}),
    ],
)
def test_a_head_comes_back_bit_for_bit(tmp_path, kind, settings):
    head = small_head(kind, **settings)
    written = save_head(head, tmp_path)
    back = load_head(tmp_path)
    assert back.config == written == head.config
    assert torch.equal(back.draft_ids, head.draft_ids)
    assert torch.equal(back.in_draft, head.in_draft)
    for (name, a), (_, b) in zip(head.named_parameters(), back.named_parameters(), strict=True):
        assert torch.equal(a, b), name
    first = (tmp_path / "model.safetensors").read_bytes()
    save_head(back, tmp_path)
    assert (tmp_path / "model.safetensors").read_bytes() == first


def test_a_head_stored_in_bfloat16_says_so_and_runs(tmp_path):
    head = small_head("eagle3")
    assert save_head(head, tmp_path, torch.bfloat16).dtype == "bfloat16"
    back = load_head(tmp_path)
    assert back.config.dtype == "bfloat16"
    assert back.draft_ids.dtype == torch.int64
    out = back(
        back.start(torch.randn(3, 96)),
        small_frozen().embed(torch.tensor([1, 2, 3])),
        torch.arange(3),
        lambda layer, q, k, v: q,
    )
    assert out.dtype == torch.bfloat16
    assert back.logits(out, small_frozen()).shape == (3, 40)


def _spoil(folder, change):
    stored, _ = load_tensors(folder / "model.safetensors")
    change(stored)
    save_tensors(folder / "model.safetensors", stored)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda x: x.pop("lm_head.weight"), "missing lm_head.weight"),
        (lambda x: x.update(embed=torch.zeros(2)), "unexpected embed"),
        (lambda x: x.update({"norm.weight": torch.zeros(31)}), r"norm.weight is \[31\], wanted \[32\]"),
        (lambda x: x.pop("d2t"), "wanted d2t with 40 entries, found nothing"),
        (lambda x: x.pop("t2d"), "wanted t2d with 60 entries, found nothing"),
        (lambda x: x["t2d"].logical_not_(), "name different tokens"),
        (lambda x: x["d2t"].add_(100), "leads outside the target's 60 tokens"),
        (lambda x: x["d2t"].__setitem__(1, x["d2t"][0] - 1), "names a target token twice"),
    ],
)
def test_anything_missing_unexpected_or_misshapen_is_refused_by_name(tmp_path, change, words):
    save_head(small_head("eagle3"), tmp_path)
    _spoil(tmp_path, change)
    with pytest.raises(UserError, match=words):
        load_head(tmp_path)


def test_a_map_for_another_vocabulary_is_refused(tmp_path):
    save_head(small_head("eagle3"), tmp_path)
    value = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**value, "vocab_size": 61}))
    with pytest.raises(UserError, match="wanted t2d with 61 entries, found \\[60\\]"):
        load_head(tmp_path)


def test_a_folder_without_a_head_says_what_to_give(tmp_path):
    with pytest.raises(UserError, match=r"config.json: not found; give a head directory"):
        load_head(tmp_path)
