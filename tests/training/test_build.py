"""The head fits the shards or is refused in one line; its vocabulary belongs to it."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file

from eagle_train.errors import UserError
from eagle_train.evaluation.predict import predict
from eagle_train.heads.disk import load_head
from eagle_train.heads.draft_vocab import choose_draft_ids
from eagle_train.heads.foreign import read_foreign
from eagle_train.recipe_files import load_recipe
from eagle_train.shards.reader import open_shards
from eagle_train.targets.extract import extract
from eagle_train.training import build
from eagle_train.training.loop import train


def refused(shards, recipe, out, **options) -> str:
    with pytest.raises(UserError) as caught:
        train(shards, recipe, out, show=False, **options)
    assert "\n" not in str(caught.value)
    assert not (out / "recipe.yaml").exists()
    return str(caught.value)


def test_shards_of_another_kind_are_refused(tmp_path, tiny, tiny_shards_dir, tiny_shards_eagle1_dir):
    assert refused(tiny_shards_eagle1_dir, tiny(), tmp_path / "a") == (
        f"{tiny_shards_eagle1_dir}: features of eagle1; recipe eagle3-tiny trains eagle3. "
        "Re-run: eagle extract --for eagle3"
    )
    recipe = load_recipe("eagle1")
    assert "recipe eagle1 trains eagle1. Re-run: eagle extract --for eagle1" in refused(
        tiny_shards_dir, recipe, tmp_path / "b"
    )


def test_other_layers_are_refused(tmp_path, tiny, tiny_shards_dir):
    recipe = tiny("head.layer_ids=[2, 4, 6]")
    assert refused(tiny_shards_dir, recipe, tmp_path / "a") == (
        f"{tiny_shards_dir}: captured layers (2, 4, 5), recipe eagle3-tiny reads (2, 4, 6); "
        "re-run: eagle extract --for eagle3 --layers 2,4,6"
    )
    assert refused(tiny_shards_dir, tiny("head.layer_ids=[2, 8]"), tmp_path / "b") == (  # as none ever could
        f"{tiny_shards_dir}: the target has 8 layers, recipe eagle3-tiny reads (2, 8); wanted ids of 0 to 7 "
        "(a recipe's head.layer_ids)"
    )


@pytest.mark.parametrize("codec", ["fp32", "int8"])
def test_some_of_the_layers_are_read_as_if_shards_held_no_others(
    codec, tmp_path, tiny, tiny_rows_dir, tiny_target_dir, weights
):
    runs = {}
    for name, layers, settings in (("all", None, ["head.layer_ids=[2, 5]"]), ("some", (2, 5), [])):
        shards = tmp_path / f"shards-{name}"
        given = {"codec": codec, "dtype": "fp32", "device": "cpu", "layer_ids": layers, "show": False}
        extract(tiny_rows_dir, tiny_target_dir, shards, features="eagle3", **given)
        runs[name] = tmp_path / name
        train(shards, tiny("run.steps=3", *settings), runs[name], show=False)
    read = {name: weights(run / "last") for name, run in runs.items()}
    assert read["all"].keys() == read["some"].keys()
    assert all(torch.equal(read["all"][name], read["some"][name]) for name in read["some"])
    assert load_head(runs["all"] / "last").config.feature_layers == (2, 5)
    found = predict(runs["all"], tmp_path / "shards-all", show=False)
    wanted = predict(runs["all"], tmp_path / "shards-some", other_target=True, show=False)
    assert {**found, "which_rows": ""} == {**wanted, "which_rows": "", "texts": found["texts"]}
    assert "captured layers (2, 5), recipe eagle3-tiny reads (2, 4)" in refused(
        tmp_path / "shards-some", tiny("head.layer_ids=[2, 4]"), tmp_path / "no"
    )


def test_a_draft_vocabulary_above_the_targets_is_refused(tmp_path, tiny, tiny_shards_dir):
    words = refused(tiny_shards_dir, tiny("head.draft_vocab_size=301"), tmp_path / "a")
    assert "the target has 300 tokens; recipe eagle3-tiny wants head.draft_vocab_size 301" in words


def test_a_start_from_a_head_and_from_a_layer_at_once_is_refused(tmp_path, tiny, tiny_shards_dir):
    words = refused(tiny_shards_dir, tiny("head.init_layer=2"), tmp_path / "a", init_from="head/")
    assert words.startswith("--init-from head/: head.init_layer 2 also says what to start from; leave one")


def test_a_head_too_large_for_memory_is_refused(tmp_path, tiny, tiny_shards_dir, monkeypatch):
    def no_memory(*_):
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 1 bytes")

    monkeypatch.setattr(build, "build_head", no_memory)
    words = refused(tiny_shards_dir, tiny("head.intermediate_size=1000000"), tmp_path / "a")
    assert "recipe eagle3-tiny: no memory for its head (intermediate_size 1,000,000, layers 1" in words


def test_holding_everything_out_is_refused(tmp_path, tiny, tiny_shards_dir):
    words = refused(tiny_shards_dir, tiny("data.held_out=24"), tmp_path / "a")
    assert "data.held_out 24 leaves none of 24 conversations" in words


def test_shards_that_are_missing_are_refused(tmp_path, tiny):
    assert "no such folder" in refused(tmp_path / "nowhere", tiny(), tmp_path / "a")


def test_a_new_head_drafts_the_most_frequent_tokens_from_the_targets_own_rows(tiny, tiny_shards_dir):
    shards = open_shards(tiny_shards_dir)
    frozen = shards.frozen_target()
    head = build.new_head(tiny("head.draft_vocab_size=20"), shards, frozen)
    assert torch.equal(head.draft_ids, choose_draft_ids(shards.supervised_frequencies, 300, 20))
    assert torch.equal(head.lm_head.weight, frozen.lm_head[head.draft_ids])
    assert head.config.feature_layers == tuple(shards.info["layer_ids"])
    again = build.new_head(tiny("head.draft_vocab_size=20"), shards, frozen)
    other = build.new_head(tiny("head.draft_vocab_size=20", "run.seed=1"), shards, frozen)
    assert torch.equal(head.fc.weight, again.fc.weight)
    assert not torch.equal(head.fc.weight, other.fc.weight)


def test_a_new_head_leaves_the_global_random_state_alone(tiny, tiny_shards_dir):
    shards = open_shards(tiny_shards_dir)
    torch.manual_seed(5)
    before = torch.get_rng_state()
    build.new_head(tiny(), shards, shards.frozen_target())
    assert torch.equal(torch.get_rng_state(), before)


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
    from eagle_train.heads.disk import build_head, save_head

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


def test_a_flipped_bit_in_a_shard_stops_training_and_extract_makes_it_anew(
    tmp_path, tiny, tiny_shards_dir, tiny_rows_dir, tiny_target_dir
):
    copy = tmp_path / "shards"
    shutil.copytree(tiny_shards_dir, copy)
    victim = copy / "shard-00000.safetensors"
    whole = victim.read_bytes()
    victim.write_bytes(whole[:-5] + bytes([whole[-5] ^ 1]) + whole[-4:])
    with pytest.raises(UserError, match=r"shard-00000\.safetensors: tensor \w+ is damaged .*extract again"):
        train(copy, tiny(), tmp_path / "run", show=False)
    extract(tiny_rows_dir, tiny_target_dir, copy, codec="fp32", show=False)
    assert victim.read_bytes() == whole


def test_a_folder_with_other_files_or_another_trainer_is_refused(tmp_path, tiny, tiny_shards_dir):
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "thesis.tex").write_text("x")
    words = refused(tiny_shards_dir, tiny(), tmp_path / "home")
    assert words.endswith("holds other files (thesis.tex); choose an empty or new --out")
    busy = tmp_path / "busy"
    busy.mkdir()
    (busy / "thesis.tex").write_text("x")  # whose it is matters before what it holds
    program = "import time; from eagle_train.training.run_folder import lock; from pathlib import Path\n"
    program += f"held = lock(Path({str(busy)!r})); print('held', flush=True); time.sleep(60)"
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout.readline() == "held\n"
        assert "another eagle train is at work in it" in refused(tiny_shards_dir, tiny(), busy)
        other.kill()


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


def test_a_refused_run_leaves_no_folder_behind(tmp_path, tiny, tiny_shards_dir):
    refused(tiny_shards_dir, tiny(), tmp_path / "new", resume=True)
    assert not (tmp_path / "new").exists()
    (tmp_path / "old").mkdir()
    (tmp_path / "old" / "mine.txt").write_text("x")
    refused(tiny_shards_dir, tiny(), tmp_path / "old")
    assert [p.name for p in (tmp_path / "old").iterdir()] == ["mine.txt"]


@pytest.mark.parametrize("kind", ["eagle3", "eagle1"])
def test_the_first_layer_may_start_from_one_of_the_targets(kind, tiny, shards_of, tiny_target_dir):
    shards = open_shards(shards_of(kind))
    recipe = tiny("head.init_layer=6", kind=kind)
    head = build.new_head(recipe, shards, shards.frozen_target())
    layer = head.midlayer if kind == "eagle3" else head.layers[0]
    stored = load_file(tiny_target_dir / "model.safetensors")
    own = dict(layer.named_parameters())
    for name in (
        "self_attn.o_proj",
        "mlp.gate_proj",
        "mlp.up_proj",
        "mlp.down_proj",
        "post_attention_layernorm",
    ):
        assert torch.equal(own[f"{name}.weight"], stored[f"model.layers.6.{name}.weight"])
    for name in ("q_proj", "k_proj", "v_proj"):
        weight, wanted = own[f"self_attn.{name}.weight"], stored[f"model.layers.6.self_attn.{name}.weight"]
        assert torch.equal(weight[:, -32:], wanted)
        assert not weight[:, :-32].any(), "what reads the embedding starts at zero"
    if kind == "eagle3":
        wanted = stored["model.layers.6.input_layernorm.weight"]
        assert torch.equal(own["hidden_norm.weight"], wanted)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (["head.init_layer=8"], "has layers 0 to 7"),
        (["head.init_layer=0", "head.intermediate_size=48"], "its mlp.down_proj.weight"),
        (["head.init_layer=0", "head.qk_norm=true"], "its self_attn.k_norm.weight"),
    ],
)
def test_a_layer_that_does_not_fit_is_refused(settings, words, tmp_path, tiny, tiny_shards_dir):
    assert words in refused(tiny_shards_dir, tiny(*settings), tmp_path / "a")


@pytest.mark.parametrize(
    "switch",
    ["fc_norm", "norm_output", "norm_before_fc", "norm_before_residual", "qk_norm", "num_hidden_layers"],
)
def test_every_switch_of_the_head_is_built_trained_and_written_down(switch, tmp_path, train_tiny):
    value = "2" if switch == "num_hidden_layers" else "true"
    train_tiny("run", f"head.{switch}={value}", "run.steps=2")
    head = load_head(tmp_path / "run" / "last")
    assert getattr(head.config, switch) == json.loads(value)
    before = build.build_head(head.config, head.draft_ids)
    assert {name for name, _ in head.named_parameters()} == {name for name, _ in before.named_parameters()}
