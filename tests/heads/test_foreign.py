"""Heads that other toolkits wrote compute here what they compute there."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from eagle_train.errors import UserError
from eagle_train.heads.disk import load_head, save_head
from eagle_train.heads.foreign import is_foreign, read_foreign

from .foreign_heads import (
    EAGLE1,
    EAGLE3,
    HD,
    HEADS,
    KV,
    SIZES,
    SPEC_FORGE,
    SPECULATORS,
    USUAL,
    D,
    Forward,
    H,
    N,
    V,
    assert_same,
    eagle1_tensors,
    eagle3_tensors,
    random_tensors,
    write,
)

MODEL_OPT = {
    **EAGLE3,
    "eagle_config": {
        "eagle_aux_hidden_state_layer_ids": [8, 1, 5],
        "use_aux_hidden_state": True,
        "use_input_layernorm_in_first_layer": True,
        "use_last_layernorm": True,
        "use_mtp_layernorm": False,
        "next_layer_regular": True,
        "parallel_draft_step": 1,
    },
}
_NORMS = {f"fc_norm.{i}.weight": torch.linspace(0.5, 1.5, H) + 0.1 * i for i in range(3)}
_EAGLE3_CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "EAGLE": ("midlayer", EAGLE3, {}, {}),
    "SpecForge": ("midlayer", SPEC_FORGE, {}, {}),
    "ModelOpt": ("layers.0", MODEL_OPT, {"t2d": False}, {}),
    "speculators": ("layers.0", SPECULATORS, {}, {}),
    "speculators, norm before residual": (
        "layers.0",
        {**SPECULATORS, "norm_before_residual": True},
        {},
        {"norm_before_residual": True},
    ),
    "speculators, norm before fc": (
        "layers.0",
        {**SPECULATORS, "norm_before_fc": True, "norm_output": True},
        {"extra": {"input_norm.weight": torch.linspace(0.5, 1.5, 3 * H)}},
        {"norm_before_fc": True, "norm_output": True},
    ),
    "speculators, qwen3": (
        "layers.0",
        {**SPECULATORS, "transformer_layer_config": {"model_type": "qwen3", **SIZES}},
        {"extra": {f"layers.0.self_attn.{n}_norm.weight": torch.linspace(0.5, 2, HD) for n in "qk"}},
        {},
    ),
    "norm before fc said in eagle_config": (
        "layers.0",
        {**MODEL_OPT, "eagle_config": {**MODEL_OPT["eagle_config"], "norm_before_fc": True}},
        {"extra": {"input_norm.weight": torch.linspace(0.5, 1.5, 3 * H)}},
        {"norm_before_fc": True},
    ),
    "SpecForge, 3.1": (
        "midlayer",
        {**SPEC_FORGE, "fc_norm": True, "norm_output": True},
        {"extra": _NORMS},
        {"fc_norm": True, "norm_output": True},
    ),
}


@pytest.mark.parametrize("case", _EAGLE3_CASES)
def test_an_eagle3_head_of_every_layout_computes_its_own_logits(case, tmp_path):
    prefix, config, made, how = _EAGLE3_CASES[case]
    tensors = eagle3_tensors(prefix, t2d=made.get("t2d", True)) | made.get("extra", {})
    copies = {"embed_tokens.weight": torch.randn(V, H)} if "speculators" in case else {}
    folder = write(tmp_path / "head", config, tensors | copies)
    assert is_foreign(folder)
    read = read_foreign(folder, num_target_layers=N)
    assert read.layout == case.split(",")[0] or case.startswith("norm before")
    assert read.head.config.layers_for(N) == USUAL
    assert_same(read.head, Forward(tensors, prefix, eagle3=True, **how))
    ids = tensors["d2t"] + torch.arange(D)
    assert read.head.draft_ids.tolist() == ids.tolist()
    assert read.head.in_draft.nonzero().flatten().tolist() == ids.tolist()

    save_head(read.head, tmp_path / "ours")  # and stays so once it is a head of ours
    assert not is_foreign(tmp_path / "ours")
    assert_same(load_head(tmp_path / "ours"), Forward(tensors, prefix, eagle3=True, **how))


def test_norms_before_fc_under_their_older_names_are_the_same_norms(tmp_path):
    old = dict(
        zip(
            ("aux_norm_low.weight", "aux_norm_mid.weight", "aux_norm_high.weight"),
            _NORMS.values(),
            strict=True,
        )
    )
    tensors = eagle3_tensors("midlayer")
    head = read_foreign(write(tmp_path / "head", {**EAGLE3, "use_aux_norm": True}, tensors | old)).head
    assert_same(head, Forward(tensors | _NORMS, "midlayer", eagle3=True, fc_norm=True))


def test_a_whole_vocabulary_needs_no_maps_and_takes_idle_ones(tmp_path):
    tensors = eagle3_tensors("midlayer", vocabulary=V)
    idle = {"d2t": torch.zeros(V, dtype=torch.int64), "t2d": torch.zeros(V, dtype=torch.bool)}
    config = {**EAGLE3, "draft_vocab_size": V}
    head = read_foreign(write(tmp_path / "idle", config, tensors | idle)).head
    assert not head.config.reduced_vocabulary
    assert_same(head, Forward(tensors, "midlayer", eagle3=True))
    idle["d2t"][3] = 1
    with pytest.raises(UserError, match="d2t moves ids although the head drafts the whole vocabulary"):
        read_foreign(write(tmp_path / "moved", config, tensors | idle))


@pytest.mark.parametrize("case", ["official", "with bias", "speculators", "q, k and v biases"])
def test_an_eagle1_head_of_every_layout_computes_its_own_states(case, tmp_path):
    tensors, config, prefix, how = eagle1_tensors(), dict(EAGLE1), "layers.0", {}
    if case == "with bias":
        tensors["fc.bias"] = torch.linspace(-1, 1, H)
        config["bias"] = True
    if case == "q, k and v biases":
        tensors |= {
            f"layers.0.self_attn.{n}_proj.bias": torch.linspace(-1, 1, size)
            for n, size in (("q", HEADS * HD), ("k", KV * HD), ("v", KV * HD))
        }
    if case == "speculators":
        prefix, how = "transformer", {"fc": "fusion_fc"}
        tensors = eagle1_tensors(prefix)
        tensors["fusion_fc.weight"] = tensors.pop("fc.weight")
        config = {
            "speculators_model_type": "eagle",
            "layernorms": False,
            "fusion_bias": False,
            "transformer_layer_config": SIZES,
        }
    copies = {"embed_tokens.weight": torch.randn(V, H)}
    read = read_foreign(write(tmp_path / "head", config, tensors | copies))
    assert read.head.config.kind == "eagle1"
    assert_same(read.head, Forward(tensors, prefix, **how))


@pytest.mark.parametrize("layout", ["vLLM", "Medusa's own"])
def test_medusa_heads_of_both_layouts_compute_their_own_logits(layout, tmp_path):
    generator = torch.Generator().manual_seed(4)
    blocks = [torch.randn(H, H, generator=generator) * H**-0.5 for _ in range(3)]
    biases = [torch.randn(H, generator=generator) for _ in range(3)]
    maps = [torch.randn(V, H, generator=generator) for _ in range(3)]
    names = ("blocks.{}.layers.0.weight", "blocks.{}.layers.0.bias", "lm_heads.{}.weight")
    config: dict[str, Any] = {"model_type": "medusa", "num_heads": 3, "vocab_size": V, "hidden_size": H}
    if layout != "vLLM":
        names = ("{}.0.linear.weight", "{}.0.linear.bias", "{}.1.weight")
        config = {"medusa_num_heads": 3, "medusa_num_layers": 1, "base_model_name_or_path": "lmsys/vicuna-7b"}
    tensors = {
        name.format(i): value[i]
        for name, value in zip(names, (blocks, biases, maps), strict=True)
        for i in range(3)
    }
    head = read_foreign(write(tmp_path / "head", config, tensors)).head
    assert (head.config.kind, head.config.medusa_heads, head.config.vocab_size) == ("medusa", 3, V)
    x = torch.randn(5, H, generator=generator)
    for i in range(3):
        block = x @ blocks[i].T + biases[i]
        got = head.logits(head(x, i), None, i)
        torch.testing.assert_close(got, (x + block * block.sigmoid()) @ maps[i].T, rtol=1e-4, atol=1e-5)
    deeper = tensors | {
        names[0].format(1).replace("0.linear", "1.linear").replace("layers.0", "layers.1"): blocks[0].clone()
    }
    with pytest.raises(UserError, match="Medusa blocks of several layers"):
        read_foreign(write(tmp_path / "deeper", config, deeper))


_SECOND = {**SPECULATORS, "transformer_layer_config": {**SIZES, "num_hidden_layers": 2}}


@pytest.mark.parametrize("norms", [["input_layernorm"], ["hidden_norm"], ["input_layernorm", "hidden_norm"]])
def test_a_second_layer_is_numbered_from_the_first_and_its_input_norm_has_either_name(norms, tmp_path):
    tensors = eagle3_tensors("layers.0") | random_tensors("layers.1", H, seed=5)
    tensors |= {f"layers.1.{name}.weight": torch.linspace(0.5, 1.5, H) for name in norms}
    head = read_foreign(write(tmp_path / "head", _SECOND, tensors)).head
    assert head.config.num_hidden_layers == 2
    further = head.layers["1"]
    assert torch.equal(further.self_attn.q_proj.weight, tensors["layers.1.self_attn.q_proj.weight"])
    assert torch.equal(further.input_layernorm.weight, torch.linspace(0.5, 1.5, H))


def test_a_second_layer_with_two_input_norms_is_refused(tmp_path):
    tensors = eagle3_tensors("layers.0") | random_tensors("layers.1", H, seed=5)
    tensors |= {
        "layers.1.input_layernorm.weight": torch.ones(H),
        "layers.1.hidden_norm.weight": torch.zeros(H),
    }
    with pytest.raises(UserError, match=r"hidden_norm\.weight, which SGLang reads, is not layers\.1\.input_"):
        read_foreign(write(tmp_path / "head", _SECOND, tensors))
