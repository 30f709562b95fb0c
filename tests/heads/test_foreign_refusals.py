"""What a foreign head leaves open is asked for, what no head here computes is refused by name."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch

from eagle_train.errors import UserError
from eagle_train.heads.foreign import read_foreign
from eagle_train.heads.foreign_config import Told

from .foreign_heads import (
    EAGLE1,
    EAGLE3,
    SPEC_FORGE,
    SPECULATORS,
    Forward,
    H,
    N,
    V,
    assert_same,
    eagle1_tensors,
    eagle3_config,
    eagle3_tensors,
    write,
)


def _pickled(folder: Path) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(EAGLE3))
    return folder / "pytorch_model.bin"


def test_a_pickle_of_tensors_is_read(tmp_path):
    tensors = eagle3_tensors("midlayer")
    torch.save(tensors, _pickled(tmp_path / "head"))
    assert_same(read_foreign(tmp_path / "head").head, Forward(tensors, "midlayer", eagle3=True))


class _Trap:
    def __init__(self, sprung: Path) -> None:
        self.sprung = sprung

    def __reduce__(self):
        return (Path.touch, (self.sprung,))


@pytest.mark.parametrize(
    "save",
    [torch.save, lambda value, file: file.write_bytes(pickle.dumps(value, 2))],
    ids=["zipped", "plain"],
)
def test_nothing_in_a_pickle_runs_and_one_of_more_than_tensors_is_refused(save, tmp_path):
    file, sprung = _pickled(tmp_path / "head"), tmp_path / "sprung"
    save(eagle3_tensors("midlayer") | {"fc.weight": _Trap(sprung)}, file)
    torch.load(file, weights_only=False) if save is torch.save else pickle.loads(file.read_bytes())
    sprung.unlink()  # a reader that trusts the file does run it
    with pytest.raises(UserError) as caught:
        read_foreign(tmp_path / "head")
    assert str(caught.value) == (
        f"{file}: cannot be read weights-only: it is damaged, or holds more than tensors, which could run "
        "code; fetch it again, or ask its makers for model.safetensors"
    )
    assert not sprung.exists()


@pytest.mark.parametrize(
    ("top", "nested", "depth", "words"),
    [
        (None, [1, 5, 8], None, r"give --target, whose depth may tell, or --layer-ids"),
        (None, [3, 7, 10], N, r"hs\[3,7,10\] .* or hs\[4,8,11\] .*; say --layer-ids 3,7,10 or .* 4,8,11"),
        ([1, 5, 8], None, N, r"say --layer-ids 1,5,8 or --layer-ids 2,6,9"),
        ([2, 6, 9], [2, 6, 9], N, r"say --layer-ids 2,6,9 or --layer-ids 3,7,10"),
    ],
)
def test_layer_ids_with_two_readings_are_asked_for(top, nested, depth, words, tmp_path):
    folder = write(tmp_path / "head", eagle3_config(top, nested), eagle3_tensors("midlayer"))
    with pytest.raises(UserError, match=words):
        read_foreign(folder, num_target_layers=depth)
    told = Told(layer_ids=(4, 8, 11))
    assert read_foreign(folder, told, depth).head.config.feature_layers == (4, 8, 11)


_REFUSED: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "window with two readings": (EAGLE3, {"sliding_window": 9}, "say --sliding-window 9, or 0 for none"),
    "two bases": (
        EAGLE3,
        {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}},
        r"rope_theta is 10000 and 25000; say which with --rope-theta",
    ),
    "partial rotation": (
        EAGLE3,
        {"rope_parameters": {"rope_type": "default", "rope_theta": 25000.0, "partial_rotary_factor": 0.5}},
        "partial_rotary_factor",
    ),
    "last layernorm": (SPEC_FORGE, {"eagle_config": {"use_last_layernorm": False}}, "use_last_layernorm is"),
    "final state only": (
        SPEC_FORGE,
        {"eagle_config": {"use_aux_hidden_state": False}},
        "use_aux_hidden_state",
    ),
    "parallel": (SPEC_FORGE, {"eagle_config": {"parallel_draft_step": 4}}, "parallel_draft_step is 4"),
    "levels that differ": (
        {**EAGLE3, "norm_before_fc": True},
        {"eagle_config": {"norm_before_fc": False}},
        "norm_before_fc is False and True",
    ),
    "residual left open": (
        SPECULATORS,
        {"norm_before_residual": None},
        "say --norm-before-residual or --no-",
    ),
    "norm said, not there": (
        EAGLE3,
        {"fc_norm": True},
        "fc_norm is True, but the file lacks fc_norm.0.weight",
    ),
    "other kind": (
        SPECULATORS,
        {"speculators_model_type": "peagle"},
        "says peagle, the weights are those of",
    ),
    "two layers said": (EAGLE3, {"num_hidden_layers": 2}, "num_hidden_layers is 2, the weights hold 1"),
    "other act": (EAGLE3, {"hidden_act": "gelu"}, "hidden_act 'gelu'"),
    "scaled logits": (EAGLE3, {"logit_scale": 0.5}, "logit_scale is 0.5"),
    "no sizes": (EAGLE3, {"hidden_size": None}, "lacks hidden_size"),
    "other width": (EAGLE3, {"target_hidden_size": 24}, r"fc.weight is \[32, 96\], wanted \[32, 72\]"),
}


@pytest.mark.parametrize("case", _REFUSED)
def test_what_is_not_computed_or_left_open_is_refused_by_name(case, tmp_path):
    config, changes, words = _REFUSED[case]
    prefix = "layers.0" if config is SPECULATORS else "midlayer"
    folder = write(tmp_path / "head", {**config, **changes}, eagle3_tensors(prefix))
    with pytest.raises(UserError, match=words):
        read_foreign(folder)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("midlayer.mlp.experts.0.up_proj.weight", "a mixture of experts"),
        ("midlayer.mlp.up_proj.weight_scale", "quantised weights"),
        ("mask_hidden", "parallel drafting"),
        ("extra.weight", "unexpected extra.weight"),
    ],
)
def test_tensors_that_no_head_here_has_are_refused_by_name(name, words, tmp_path):
    folder = write(tmp_path / "head", EAGLE3, eagle3_tensors("midlayer") | {name: torch.ones(H)})
    with pytest.raises(UserError, match=words):
        read_foreign(folder)


@pytest.mark.parametrize("name", ["lm_head.weight", "norm.weight", "d2t", "midlayer.self_attn.k_proj.weight"])
def test_a_missing_tensor_is_refused_by_name(name, tmp_path):
    tensors = eagle3_tensors("midlayer")
    del tensors[name]
    with pytest.raises(UserError, match=name.replace(".", r"\.")):
        read_foreign(write(tmp_path / "head", EAGLE3, tensors))


def test_copies_of_the_targets_tables_must_be_the_targets(tmp_path):
    embedding = torch.randn(V, H)
    tensors = eagle1_tensors() | {"embed_tokens.weight": embedding.half(), "lm_head.weight": 2 * embedding}
    read = read_foreign(write(tmp_path / "head", EAGLE1, tensors))
    read.check_copies(embedding, 2 * embedding, "head")
    with pytest.raises(UserError, match=r"head: its lm_head\.weight is not the target's"):
        read.check_copies(embedding, embedding, "head")
    with pytest.raises(UserError, match=r"head: its embed_tokens\.weight is not the target's"):
        read.check_copies(embedding[:-1], 2 * embedding, "head")
