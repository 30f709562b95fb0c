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
from eagle_train.heads.ttt import unroll
from eagle_train.losses.acceptance import draft_logits, draft_steps
from eagle_train.recipe_files import load_recipe
from eagle_train.shards.batches import counted_rows
from eagle_train.shards.reader import open_shards
from eagle_train.targets.extract import extract
from eagle_train.training import build
from eagle_train.training.loop import train
from tests.heads.small import TWO_DOCUMENTS, D, DenseMemory, small_batch, small_frozen, small_head

from .conftest import refused


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


def test_every_weight_of_the_loss_means_what_the_recipe_says(tiny):
    """EAGLE-1 with HASS: feature_weight x regression + token_weight x CE + top_k_weight x CE of the top k."""
    weights = ["loss.feature_weight=1.5", "loss.token_weight=0.2", "loss.top_k=3", "loss.top_k_weight=0.7"]
    recipe = tiny("loss.ttt_steps=2", "loss.step_decay=0.5", *weights, kind="eagle1")
    head, frozen = small_head("eagle1"), small_frozen()
    batch = small_batch("eagle1", frozen)
    counts = torch.tensor([counted_rows(spans, 2) for _, spans in TWO_DOCUMENTS]).sum(0)
    wanted = 0.0
    for step in unroll(head, frozen, batch, 2, memory=DenseMemory):
        last = batch.label_last[batch.label0[step.index] + step.number]
        p, log_q = frozen.logits(last).softmax(-1), frozen.logits(step.out).log_softmax(-1)
        top = p.topk(3, dim=-1).indices
        cross, of_top = (-(x * y).sum() for x, y in ((p, log_q), (p.gather(-1, top), log_q.gather(-1, top))))
        regression = torch.nn.functional.smooth_l1_loss(step.out, last, reduction="none").mean(-1).sum()
        total = 1.5 * regression + 0.2 * cross + 0.7 * of_top
        wanted = wanted + 0.5**step.number * total / counts[step.number]
    found = build.head_step(head, frozen, recipe)(batch, counts).loss
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=0)


@pytest.mark.parametrize("kind", ["eagle3", "medusa"])
def test_every_setting_of_the_loss_reaches_the_step(kind, tiny):
    """One written out: total variation, each step half as heavy as the one before."""
    own = {"eagle3": ["loss.ttt_steps=2"], "medusa": ["head.kind=medusa", "head.medusa_heads=2"]}[kind]
    recipe = tiny("loss.divergence=tv", "loss.step_decay=0.5", *own)
    settings = {"medusa_heads": 2, "draft_vocab_size": D} if kind == "medusa" else {}
    head, frozen = small_head(kind, **settings), small_frozen()
    batch = small_batch(kind, frozen)
    counts = torch.tensor([counted_rows(spans, 2) for _, spans in TWO_DOCUMENTS]).sum(0)
    wanted = 0.0
    for step in draft_steps(head, frozen, batch, 2):
        label = batch.label0[step.index] + step.number
        q = draft_logits(head, step.out, frozen, step.number).softmax(-1)
        p = frozen.logits(batch.label_last[label])[:, head.draft_ids].softmax(-1)
        rows = 0.5 * (p - q).abs().sum(-1)[head.in_draft[batch.label_argmax[label]]]
        wanted = wanted + 0.5**step.number * rows.sum() / counts[step.number]
    found = build.head_step(head, frozen, recipe)(batch, counts).loss
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=0)
    top = build.head_step(head, frozen, tiny("loss.top_k=4", "loss.top_k_weight=0.7", *own))
    assert top.top_k == (4, 0.7)
