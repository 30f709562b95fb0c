"""A run's best is what gets exported, with what the run recorded; what is scored is what serves."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch

from eagle_train.evaluation.heads import open_head
from eagle_train.export.export import export
from eagle_train.export.source import Source, find_source
from eagle_train.heads.disk import load_head
from eagle_train.io.tensors import load_tensors
from eagle_train.io.text import write_json
from eagle_train.recipe_files import load_recipe
from eagle_train.training.loop import train

_STEPS = ["run.steps=2", "run.epochs=null", "run.eval_every=1", "run.save_every=1", "data.held_out=4"]


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory, tiny_shards_dir) -> Path:
    """An EAGLE-3 run of two steps on the tiny shards."""
    out = tmp_path_factory.mktemp("training") / "run"
    train(tiny_shards_dir, load_recipe("eagle3-tiny", _STEPS), out, show=False)
    return out


@pytest.fixture(scope="module")
def eagle1_run_dir(tmp_path_factory, tiny_shards_eagle1_dir) -> Path:
    """An EAGLE-1 run of two steps."""
    out = tmp_path_factory.mktemp("training") / "run"
    train(tiny_shards_eagle1_dir, load_recipe("eagle1", _STEPS), out, show=False)
    return out


def test_a_run_exports_its_best_with_recipe_target_and_acceptance(run_dir, tiny_target_dir, tmp_path):
    made = export(run_dir, tmp_path / "out", engine="sglang")
    best = (run_dir / "best").resolve()
    trained, exported = load_head(best), load_head(tmp_path / "out")
    assert all(
        torch.equal(value, dict(exported.named_parameters())[name])
        for name, value in trained.named_parameters()
    )
    record = json.loads((tmp_path / "out" / "provenance.json").read_text())
    assert record["source"]["run"] == "run"
    assert record["source"]["head"] == best.name
    assert made["checkpoint"] == f"best, step {int(best.name[5:])}"
    assert record["recipe"] == "eagle3-tiny"
    run = json.loads((run_dir / "run.json").read_text())
    identity = json.loads((Path(run["shards_folder"]) / "target.json").read_text())["target"]
    assert record["target"]["name"] == tiny_target_dir.name
    rows = json.loads((Path(run["shards_folder"]) / "shards.json").read_text())["rows_fingerprint"]
    assert record["data"] == {"shards": run["shards"], "rows": rows}
    assert record["target"]["fingerprint"] == identity["fingerprint"] != ""
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    scored = [line for line in lines if line["step"] == int(best.name[5:]) and "tau" in line][-1]
    assert made["acceptance"] == {
        "draft": f"chain of {load_recipe('eagle3-tiny').run.eval_gamma}",
        "temperature": 0.0,
        "tau": scored["tau"],
        "accepted_by_position": scored["accepted_by_position"],
        "rounds": scored["rounds"],
        "held_out_conversations": run["held_out_conversations"],
    }
    card = (tmp_path / "out" / "README.md").read_text()
    assert f"acceptance length {scored['tau']:.2f}" in card
    assert run["held_out_conversations"] == 4
    assert "on 4 held-out conversations (so few give a rough figure)" in card
    assert "recipe: eagle3-tiny" in card
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    ids = "eagle_aux_hidden_state_layer_ids"
    assert config[ids] == [k + 1 for k in config["eagle_config"][ids]]
    assert "so each of its numbers is one less" in card


def test_any_checkpoint_of_a_run_can_be_exported(run_dir, tmp_path):
    first = run_dir / "checkpoints" / "step-000001"
    assert export(first, tmp_path / "out", engine="vllm")["checkpoint"] is None, "its name says it"
    record = json.loads((tmp_path / "out" / "provenance.json").read_text())
    assert record["source"]["head"] == "step-000001"
    exported, _ = load_tensors(tmp_path / "out" / "model.safetensors")
    assert torch.equal(exported["fc.weight"], load_tensors(first / "model.safetensors")[0]["fc.weight"])


def test_out_never_replaces_the_run(run_dir):
    from eagle_train.errors import UserError

    for out in (run_dir, run_dir / "checkpoints", run_dir / "best"):
        with pytest.raises(UserError, match="--out"):
            export(run_dir, out, engine="vllm", overwrite=True)
    assert find_source(run_dir).folder.is_dir()


def test_a_refusal_names_what_was_typed(run_dir, tmp_path):
    from eagle_train.errors import UserError

    with pytest.raises(UserError) as caught:
        export(f"{run_dir}/", tmp_path / "out", engine="speculators")
    assert str(caught.value).startswith(f"{run_dir}/: ")


def test_records_that_are_gone_are_not_needed(run_dir, tmp_path):
    copy = tmp_path / "run"
    shutil.copytree(run_dir, copy, symlinks=True)
    for name in ("run.json", "recipe.yaml", "metrics.jsonl"):
        (copy / name).unlink()
    made = export(copy, tmp_path / "out", engine="vllm")
    assert made["recipe"] is None
    assert made["acceptance"] is None


def test_without_the_target_at_hand_its_facts_come_from_the_run(run_dir, tmp_path):
    copy = tmp_path / "run"
    shutil.copytree(run_dir, copy, symlinks=True)
    head = (copy / "best").resolve()
    config = json.loads((head / "config.json").read_text())
    config["eagle_train"]["target"] = "org/elsewhere"
    write_json(head / "config.json", {**config, "max_position_embeddings": 128})
    record = json.loads((copy / "run.json").read_text())
    record["target"] = {"name": "org/elsewhere", "dtype": "bf16", "revision": "abc"}
    write_json(copy / "run.json", record)
    facts = find_source(copy).target("org/elsewhere")
    assert (facts.dtype, facts.num_layers, facts.max_positions, facts.revision) == ("bfloat16", 8, 512, "abc")
    export(copy, tmp_path / "out", engine="sglang")
    exported = load_head(tmp_path / "out")
    assert exported.config.max_position_embeddings == 512  # the target's, not the head's own
    assert exported.config.dtype == "bfloat16"


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_eagle1_exports_score_as_the_run_does(engine, eagle1_run_dir, tiny_shards_eagle1_dir, tmp_path):
    from eagle_train.evaluation.predict import predict

    export(eagle1_run_dir, tmp_path / "out", engine=engine)
    assert (open_head(tmp_path / "out").fc.bias is not None) == (engine == "sglang")
    of_run, of_export = (
        predict(open_head(head), str(tiny_shards_eagle1_dir), gamma=3)
        for head in (eagle1_run_dir, tmp_path / "out")
    )
    assert of_run["tau"] == of_export["tau"]
    assert of_run["accepted_histogram"] == of_export["accepted_histogram"]


def test_eagle3_export_scores_as_the_run_does(run_dir, tiny_shards_dir, tmp_path):
    from eagle_train.evaluation.predict import predict

    export(run_dir, tmp_path / "out", engine="vllm")
    of_run, of_export = (
        predict(open_head(head), str(tiny_shards_dir), gamma=3) for head in (run_dir, tmp_path / "out")
    )
    assert of_run["tau"] == of_export["tau"]
    assert of_run["accepted_histogram"] == of_export["accepted_histogram"]


def test_a_folder_that_only_looks_like_a_checkpoint_has_no_figures(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 2, "tau": 1.5}\n')
    for name in ("step-\u00b2", "step-2", "step-best"):
        assert Source(folder=tmp_path / "checkpoints" / name, run=tmp_path).acceptance() is None
    found = Source(folder=tmp_path / "checkpoints" / "step-000002", run=tmp_path).acceptance()
    assert found["tau"] == 1.5
