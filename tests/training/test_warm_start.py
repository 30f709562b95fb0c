"""A run that begins from a head: its weights, vocabulary and layers go on, what does not fit is one line."""

from __future__ import annotations

import dataclasses
import json
import shutil

import pytest
import torch

from eagle_train.heads.disk import build_head, load_head, save_head
from eagle_train.heads.foreign import read_foreign
from eagle_train.shards.batches import counted_rows, pack
from eagle_train.shards.reader import open_shards
from eagle_train.training import build
from eagle_train.training.held_out import split
from eagle_train.training.loop import train
from eagle_train.training.metrics import read_metrics

from .conftest import refused


@pytest.fixture
def trained(tmp_path, tiny, tiny_shards_dir):
    """A run whose head has a vocabulary map that these shards would not choose."""
    run = tmp_path / "trained"
    shards = open_shards(tiny_shards_dir)
    train(tiny_shards_dir, tiny("run.steps=1"), run, show=False)
    folder = (run / "best").resolve()
    head = load_head(folder)
    chosen = torch.arange(300 - 128, 300)
    assert not torch.equal(chosen, head.draft_ids)
    other = build_head(head.config, chosen)
    other.load_state_dict(dict(head.named_parameters()), strict=False)
    save_head(other, tmp_path / "head")
    return run, tmp_path / "head", shards


@pytest.mark.parametrize("source", ["run", "head", "made elsewhere"])
def test_a_warm_start_takes_weights_and_vocabulary_from_its_source(
    source, tmp_path, tiny, tiny_shards_dir, trained
):
    run, folder, shards = trained
    place = run if source == "run" else folder
    stored = load_head(run / "best" if source == "run" else folder)
    if source == "made elsewhere":
        config = json.loads((folder / "config.json").read_text())
        del config["eagle_train"]
        (folder / "config.json").write_text(json.dumps(config))
    head = build.warm_head(place, tiny(), shards, shards.frozen_target())
    assert torch.equal(head.draft_ids, stored.draft_ids)
    assert torch.equal(head.fc.weight, stored.fc.weight)
    out = tmp_path / "warm"
    train(tiny_shards_dir, tiny("optim.lr=1e-30"), out, init_from=str(place), show=False)
    after = load_head(out / "last")
    assert torch.equal(after.draft_ids, stored.draft_ids)
    assert torch.allclose(after.fc.weight, stored.fc.weight)


def test_a_resume_takes_the_checkpoints_vocabulary(tmp_path, tiny, tiny_shards_dir, trained):
    _, folder, _ = trained
    out = tmp_path / "warm"
    train(tiny_shards_dir, tiny("run.steps=2"), out, init_from=str(folder), show=False)
    train(tiny_shards_dir, tiny("run.steps=4"), out, resume=True, show=False)
    assert torch.equal(load_head(out / "last").draft_ids, load_head(folder).draft_ids)
    assert json.loads((out / "run.json").read_text())["init_from"] == str(folder)


def test_a_head_of_other_sizes_is_no_start(tmp_path, tiny, tiny_shards_dir, trained):
    _, folder, _ = trained
    words = refused(tiny_shards_dir, tiny("head.fc_norm=true"), tmp_path / "a", init_from=str(folder))
    assert f"--init-from {folder}: fc_norm False; recipe eagle3-tiny on these shards wants True" in words
    config = json.loads((folder / "config.json").read_text())
    larger = shutil.copytree(folder, tmp_path / "larger")
    (larger / "config.json").write_text(json.dumps(config | {"vocab_size": 320}))
    words = refused(tiny_shards_dir, tiny(), tmp_path / "a", init_from=str(larger))
    assert "wanted t2d with 320 entries, found [300]" in words
    words = refused(tiny_shards_dir, tiny(), tmp_path / "a", init_from=str(tmp_path / "none"))
    assert "wanted a head or a run" in words


def test_a_start_from_a_head_and_from_a_layer_at_once_is_refused(tmp_path, tiny, tiny_shards_dir):
    words = refused(tiny_shards_dir, tiny("head.init_layer=2"), tmp_path / "a", init_from="head/")
    assert words.startswith("--init-from head/: head.init_layer 2 also says what to start from; leave one")


def test_a_warm_start_keeps_layer_ids_and_target_and_refuses_other_layers(
    tmp_path, tiny, tiny_shards_dir, trained
):
    _, folder, shards = trained
    config = json.loads((folder / "config.json").read_text())
    foreign = shutil.copytree(folder, tmp_path / "foreign")
    del config["eagle_train"], config["eagle_config"], config["eagle_aux_hidden_state_layer_ids"]
    (foreign / "config.json").write_text(json.dumps(config))
    assert read_foreign(foreign).head.config.feature_layers == ()
    train(tiny_shards_dir, tiny("run.steps=1"), tmp_path / "warm", init_from=str(foreign), show=False)
    after = load_head(tmp_path / "warm" / "last").config
    assert after.feature_layers == tuple(shards.info["layer_ids"]) == (2, 4, 5)
    assert after.target == shards.info["target"]["name"] != ""
    config["eagle_config"] = {"eagle_aux_hidden_state_layer_ids": [1, 2, 4]}  # hs[2], hs[3], hs[5]
    (foreign / "config.json").write_text(json.dumps(config))
    words = refused(tiny_shards_dir, tiny(), tmp_path / "a", init_from=str(foreign))
    assert "say --layer-ids 1,2,4 or --layer-ids 2,3,5 (an option of eagle import)" in words
    config["eagle_aux_hidden_state_layer_ids"] = [2, 3, 5]
    (foreign / "config.json").write_text(json.dumps(config))
    words = refused(tiny_shards_dir, tiny(), tmp_path / "a", init_from=str(foreign))
    assert "feature_layers (2, 3, 5); recipe eagle3-tiny on these shards wants (2, 4, 5)" in words


def test_a_warm_start_from_another_toolkit_goes_on_with_its_forward(tmp_path, tiny, tiny_shards_dir, trained):
    _, folder, _ = trained
    config = json.loads((folder / "config.json").read_text())
    foreign = shutil.copytree(folder, tmp_path / "foreign")
    del config["eagle_train"]
    changes = {"norm_before_residual": True, "rope_theta": 5e5, "rope_parameters": None, "rms_norm_eps": 2e-6}
    (foreign / "config.json").write_text(json.dumps(config | changes))
    train(tiny_shards_dir, tiny("run.steps=1"), tmp_path / "warm", init_from=str(foreign), show=False)
    after = load_head(tmp_path / "warm" / "last").config
    assert after.norm_before_residual
    assert after.rope_parameters["rope_theta"] == 5e5
    assert after.rms_norm_eps == 2e-6
    window = {"sliding_window": 4, "layer_types": ["sliding_attention"]}
    (foreign / "config.json").write_text(json.dumps(config | window))
    words = refused(tiny_shards_dir, tiny(), tmp_path / "a", init_from=str(foreign))
    assert "the head sees 4 tokens, the longest row has" in words


def _smaller(source, out, size):
    """The head with the last `size` tokens of its map, saved."""
    head = load_head(source)
    kept = head.draft_ids[-size:]
    other = build_head(dataclasses.replace(head.config, draft_vocab_size=size), kept)
    own = dict(head.named_parameters())
    other.load_state_dict(own | {"lm_head.weight": own["lm_head.weight"][-size:]}, strict=False)
    save_head(other, out)
    return kept


def test_another_draft_vocabulary_is_asked_for_and_then_the_heads_own(
    tmp_path, tiny, tiny_shards_dir, trained
):
    _, folder, _ = trained
    kept = _smaller(folder, tmp_path / "smaller", 50)
    words = refused(tiny_shards_dir, tiny(), tmp_path / "a", init_from=str(tmp_path / "smaller"))
    assert words == (
        f"--init-from {tmp_path / 'smaller'}: draft_vocab_size 50; recipe eagle3-tiny on these shards "
        "wants 128. Give another head, or set the recipe to the head's"
    )
    recipe = tiny("head.draft_vocab_size=50", "run.steps=1")
    train(tiny_shards_dir, recipe, tmp_path / "warm", init_from=str(tmp_path / "smaller"), show=False)
    assert torch.equal(load_head(tmp_path / "warm" / "last").draft_ids, kept)


@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        ("eagle3", ["head.layer_ids=[2, 5]", "head.num_hidden_layers=2"]),
        ("eagle3", ["head.kind=medusa", "head.medusa_heads=3"]),
        ("eagle1", ["head.num_hidden_layers=2"]),
    ],
)
def test_a_warm_start_of_any_kind_begins_where_its_head_stood(kind, settings, tmp_path, tiny, shards_of):
    """Its features and layers, another number of steps ahead: the first loss is that of its weights."""
    train(shards_of(kind), tiny(*settings, "optim.lr=0.02", kind=kind), tmp_path / "first", show=False)
    begin, out = tmp_path / "first" / "last", tmp_path / "warm"
    changes = ["optim.lr=1e-30", "run.steps=1", "data.rows_per_step=99", "loss.ttt_steps=2"]
    changes += ["loss.noise=0"] if kind == "eagle1" else []
    recipe = tiny(*settings, *changes, kind=kind)
    train(shards_of(kind), recipe, out, init_from=str(begin), show=False)
    shards, head = open_shards(shards_of(kind)), load_head(begin)
    if recipe.head.layer_ids:
        shards.read_layers(recipe.head.layer_ids, "the test")
    rows = split(shards.conversation_ids, 2.0)[0]
    step = build.head_step(head, shards.frozen_target(), recipe)
    counts = torch.tensor([counted_rows(shards.spans[row], step.num_steps) for row in rows]).sum(0)
    found = step(pack(shards.read_rows(rows), recipe.head.kind), counts)
    assert read_metrics(out)[-1]["loss"] == pytest.approx((found.loss_sums / counts).tolist(), abs=2e-5)
    after = load_head(out / "last")
    assert after.config == head.config
    for name, value in head.named_parameters():
        torch.testing.assert_close(dict(after.named_parameters())[name], value, rtol=0, atol=1e-12)


def test_other_layers_than_the_heads_are_asked_for_by_the_recipe(tmp_path, tiny, tiny_shards_dir):
    train(tiny_shards_dir, tiny("head.layer_ids=[2, 5]", "run.steps=1"), tmp_path / "first", show=False)
    words = refused(tiny_shards_dir, tiny(), tmp_path / "a", init_from=str(tmp_path / "first"))
    assert "feature_layers (2, 5); recipe eagle3-tiny on these shards wants (2, 4, 5)" in words
