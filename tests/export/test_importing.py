"""`eagle import` makes a head of ours of another's, asks what is open, and leaves nothing half-made."""

from __future__ import annotations

import json
import shutil
from dataclasses import asdict
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from eagle_cli.main import main
from eagle_cli.options import eval_command
from eagle_train.errors import UserError
from eagle_train.evaluation.heads import find_head, open_head
from eagle_train.export.export import export
from eagle_train.export.importing import import_head, switches
from eagle_train.export.verify import reference_outputs
from eagle_train.heads.disk import load_head
from eagle_train.heads.foreign import ForeignHead
from eagle_train.heads.foreign_config import Told
from eagle_train.io.text import write_json


def _target(folder: Path) -> str:
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / "config.json", {"num_hidden_layers": 8, "dtype": "float32"})
    return str(folder)


def _as_spec_forge(source: Path, folder: Path) -> Path:
    """Rewrite a head of ours as SpecForge leaves it: nested ids of layers' outputs, nothing of eagle's."""
    folder.mkdir()
    config = json.loads((source / "config.json").read_text())
    for key in (
        "eagle_train",
        "eagle_aux_hidden_state_layer_ids",
        "num_aux_hidden_states",
        "rope_parameters",
    ):
        del config[key]
    write_json(folder / "config.json", config)
    save_file(load_file(source / "model.safetensors"), folder / "model.safetensors")
    return folder


def _run(*arguments: str) -> int:
    with pytest.raises(SystemExit) as exit_:
        main(["import", *arguments])
    assert isinstance(exit_.value.code, int)
    return exit_.value.code


def test_an_imported_head_computes_the_same_and_knows_its_layers(head_dir, tmp_path, capsys):
    source = head_dir("eagle3", draft_vocab_size=40, feature_layers=(2, 4, 5), fc_norm=True)
    theirs, target = _as_spec_forge(source, tmp_path / "theirs"), _target(tmp_path / "target")
    out = tmp_path / "ours"
    assert _run(str(theirs), "--target", target, "--out", str(out)) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith(f"{out}: eagle3 head from the layout of SpecForge, float32, ")
    assert lines[1] == "reads: hs[2], hs[4], hs[5]"
    assert lines[2] == "RoPE: default, base 25000; draft vocabulary: 40 of 96 tokens"
    assert lines[3] == "switches: fc_norm"
    assert lines[-1] == f"next: {eval_command(str(out), target)}"
    before, after = load_head(source), load_head(out)
    assert torch.equal(reference_outputs(before), reference_outputs(after))
    assert after.config.feature_layers == (2, 4, 5)
    assert after.config.target == target
    assert sorted(entry.name for entry in out.iterdir()) == [
        "config.json",
        "model.safetensors",
        "provenance.json",
    ]
    record = json.loads((out / "provenance.json").read_text())
    assert (record["made_by"], record["source"], record["layout"]) == ("eagle import", "theirs", "SpecForge")
    import_head(theirs, out, target=target)  # an earlier import is replaced


def test_what_is_open_is_asked_for_and_nothing_is_made(head_dir, tmp_path, capsys):
    theirs = _as_spec_forge(head_dir("eagle3", feature_layers=(2, 4, 5)), tmp_path / "theirs")
    out = tmp_path / "ours"
    assert _run(str(theirs), "--out", str(out)) == 2
    assert "give --target, whose depth may tell, or --layer-ids" in capsys.readouterr().err
    assert _run(str(theirs), "--layer-ids", "2,4,x", "--out", str(out)) == 2
    assert "--layer-ids 2,4,x: wanted numbers" in capsys.readouterr().err
    assert not out.exists()
    assert (
        _run(str(theirs), "--layer-ids", "1,3,4", "--rope-theta", "500000", "--out", str(out), "--json") == 0
    )
    made = json.loads(capsys.readouterr().out)
    assert made["feature_layers"] == [1, 3, 4]
    assert made["rope"] == {"rope_type": "default", "rope_theta": 500000.0}
    assert load_head(out).config.rope_parameters["rope_theta"] == 500000.0


def test_every_switch_that_is_on_is_named(head_dir):
    on = ("fc_norm", "norm_output", "qk_norm", "attention_bias")
    read = ForeignHead(load_head(head_dir("eagle3", **dict.fromkeys(on, True))), "EAGLE", (), None, None)
    assert sorted(switches(read)) == sorted(on)


_OF_MEDUSA = {"kind", "hidden_size", "vocab_size", "draft_vocab_size", "medusa_heads", "dtype"}  # no layers


@pytest.mark.parametrize(
    ("kind", "engine", "fields"),
    [
        ("eagle3", "vllm", {"draft_vocab_size": 40, "norm_output": True, "sliding_window": 5}),
        (
            "eagle3",
            "vllm",
            {"feature_layers": (0, 2, 4), "norm_before_residual": True, "num_hidden_layers": 2},
        ),
        ("eagle3", "sglang", {"draft_vocab_size": 40, "fc_norm": True, "llama3": True}),
        ("eagle3", "sglang", {"num_hidden_layers": 3}),
        ("eagle3", "speculators", {"draft_vocab_size": 40, "qk_norm": True, "num_hidden_layers": 2}),
        ("eagle3", "speculators", {"norm_before_fc": True, "norm_before_residual": True, "llama3": True}),
        ("eagle3", "eagle", {"draft_vocab_size": 40, "head_dim": 8}),
        ("eagle1", "vllm", {"num_hidden_layers": 2}),
        ("eagle1", "sglang", {"llama3": True}),
        ("eagle1", "eagle", {"head_dim": 8, "fc_bias": True}),
        ("medusa", "vllm", {"medusa_heads": 2}),
    ],
)
def test_what_was_exported_for_any_engine_is_imported_as_it_was(kind, engine, fields, head_dir, tmp_path):
    source, served, ours = head_dir(kind, **fields), tmp_path / "served", tmp_path / "ours"
    given = {"target": _target(tmp_path / "target")} if engine == "eagle" else {}
    export(source, served, engine=engine, dtype="keep", **given)
    import_head(served, ours)
    before, after = load_head(source), load_head(ours)
    assert torch.equal(reference_outputs(before), reference_outputs(after))
    was, now = asdict(before.config), asdict(after.config)
    kept = _OF_MEDUSA if kind == "medusa" else was.keys() - ({"target"} if given else set())
    kept -= {"fc_bias"} if (kind, engine) == ("eagle1", "sglang") else set()  # its class has one, of zeros
    assert {name for name in kept if was[name] != now[name]} == set()


def test_an_export_leaves_nothing_open_and_a_run_needs_no_import(head_dir, tmp_path, capsys):
    run = tmp_path / "run"
    shutil.copytree(head_dir("eagle3"), run / "checkpoints" / "step-000001")
    (run / "best").symlink_to(run / "checkpoints" / "step-000001")
    for source in (run, run / "checkpoints" / "step-000001"):
        assert _run(str(source), "--out", str(tmp_path / "ours")) == 2
        assert f"{source}: a run of eagle train, whose head needs no import" in capsys.readouterr().err
    export(run, tmp_path / "served", engine="vllm")
    assert _run(str(tmp_path / "served"), "--layer-ids", "1,3,4", "--out", str(tmp_path / "ours")) == 2
    assert "--layer-ids: " in capsys.readouterr().err
    assert not (tmp_path / "ours").exists()
    assert _run(str(tmp_path / "served"), "--out", str(tmp_path / "ours")) == 0
    assert "eagle3 head from the layout of eagle export, float32, " in capsys.readouterr().out


def test_a_pickle_is_found_and_imported(head_dir, tmp_path):
    source = head_dir("eagle1")
    theirs = tmp_path / "theirs"
    theirs.mkdir()
    config = json.loads((source / "config.json").read_text())
    del config["eagle_train"]
    write_json(theirs / "config.json", config)
    torch.save(load_file(source / "model.safetensors"), theirs / "pytorch_model.bin")
    assert find_head(theirs) == theirs
    made = import_head(theirs, tmp_path / "ours")
    assert made["layout"] == "EAGLE"
    assert torch.equal(reference_outputs(load_head(source)), reference_outputs(load_head(tmp_path / "ours")))


def test_a_foreign_head_exports_and_opens_as_it_is(head_dir, tmp_path):
    theirs = _as_spec_forge(head_dir("eagle3", feature_layers=(2, 4, 5)), tmp_path / "theirs")
    target = _target(tmp_path / "target")
    export(theirs, tmp_path / "served", engine="vllm", target=target)
    exported = load_head(tmp_path / "served")
    assert exported.config.feature_layers == (2, 4, 5)
    assert torch.equal(reference_outputs(open_head(theirs, depth=8)), reference_outputs(exported))


def test_an_import_that_fails_half_way_leaves_nothing(head_dir, tmp_path, monkeypatch):
    import eagle_train.export.importing as module

    theirs = _as_spec_forge(head_dir("eagle3", feature_layers=(2, 4, 5)), tmp_path / "theirs")

    def other(folder):
        head = load_head(folder)
        with torch.no_grad():
            head.norm.weight[0] += 1
        return head

    monkeypatch.setattr(module, "load_head", other)
    with pytest.raises(UserError, match="is not the one imported"):
        import_head(theirs, tmp_path / "ours", told=Told(layer_ids=(2, 4, 5)))
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["head", "theirs"]  # head: the fixture's


def test_a_foreign_head_is_scored_as_its_original_and_only_with_the_targets_tables(tiny_target_dir, tmp_path):
    from eagle_train.decoding.shapes import Chain
    from eagle_train.evaluation.assurance import verify_head
    from eagle_train.evaluation.evaluate import evaluate
    from eagle_train.evaluation.methods import Method
    from eagle_train.evaluation.questions import Question
    from eagle_train.heads.config import HeadConfig
    from eagle_train.heads.disk import build_head, save_head
    from eagle_train.targets.load import load_target

    target = load_target(str(tiny_target_dir), dtype="fp32", device="cpu")
    torch.manual_seed(0)
    config = HeadConfig.for_target(target.config.to_dict(), "eagle3", norm_before_residual=True)
    head = build_head(config)
    with torch.no_grad():
        head.lm_head.weight.copy_(target.lm_head.weight)
    save_head(head, tmp_path / "source")
    theirs = _as_spec_forge(tmp_path / "source", tmp_path / "theirs")
    questions = [Question("a", "", ("Why is the sea deep?",)), Question("b", "", ("Bread?",))]

    def score(folder: Path) -> dict:
        return evaluate(folder, target, questions, [Chain(3)], max_new_tokens=40, show=False)

    ours, scored = score(tmp_path / "source"), score(theirs)
    assert scored["lossless"] is True
    assert scored["accepted_histogram"] == ours["accepted_histogram"]

    file = theirs / "model.safetensors"
    tensors = {name: tensor.clone() for name, tensor in load_file(file).items()}  # the file is written over
    save_file(tensors | {"embed_tokens.weight": target.embedding.clone()}, file)
    assert score(theirs)["accepted_histogram"] == ours["accepted_histogram"]
    torch.save(tensors, theirs / "pytorch_model.bin")
    file.unlink()
    assert score(theirs)["accepted_histogram"] == ours["accepted_histogram"]
    given = {"max_new_tokens": 40, "show": False}
    named = evaluate(None, target, questions, [Chain(3)], methods=[Method("eagle3", str(theirs))], **given)
    assert named["accepted_histogram"] == ours["accepted_histogram"]
    given = {"num_questions": 1, "max_turns": 1, "max_new_tokens": 4, "dtypes": ["fp32"], "show": False}
    assert not verify_head(theirs, str(tiny_target_dir), **given)["unexplained"]
    save_file(tensors | {"embed_tokens.weight": 2 * target.embedding}, file)
    with pytest.raises(UserError, match=r"its embed_tokens\.weight is not the target's"):
        score(theirs)


@pytest.mark.parametrize("odd", ["x", -1, 1e9, [8]])
def test_a_targets_depth_that_is_no_count_is_named(odd, head_dir, tmp_path):
    theirs = _as_spec_forge(head_dir("eagle3", feature_layers=(2, 4, 5)), tmp_path / "theirs")
    target = _target(tmp_path / "target")
    write_json(tmp_path / "target" / "config.json", {"num_hidden_layers": odd})
    with pytest.raises(UserError, match=r"target: num_hidden_layers is .* in its config\.json, wanted"):
        import_head(theirs, tmp_path / "ours", target=target)
    write_json(tmp_path / "target" / "config.json", {"num_hidden_layers": 8, "text_config": 5})
    assert import_head(theirs, tmp_path / "ours", target=target)["feature_layers"] == [2, 4, 5]


def test_weights_that_are_no_numbers_are_neither_imported_nor_exported(head_dir, tmp_path):
    source = head_dir("eagle3", feature_layers=(2, 4, 5))
    file = source / "model.safetensors"
    tensors = {name: tensor.clone() for name, tensor in load_file(file).items()}  # the file is written over
    tensors["norm.weight"][3] = float("nan")
    save_file(tensors, file)
    theirs, told = _as_spec_forge(source, tmp_path / "theirs"), Told(layer_ids=(2, 4, 5))
    with pytest.raises(UserError, match=r"theirs: norm\.weight holds NaN or infinity"):
        import_head(theirs, tmp_path / "ours", told=told)
    with pytest.raises(UserError, match=r"model\.safetensors: norm\.weight holds NaN or infinity"):
        export(source, tmp_path / "served", engine="vllm", target=_target(tmp_path / "target"))
    assert not (tmp_path / "ours").exists()
    assert not (tmp_path / "served").exists()
