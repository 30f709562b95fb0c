"""`eagle import` makes a head of ours of another's, asks what is open, and leaves nothing half-made."""

from __future__ import annotations

import json
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
from eagle_train.io import write_json


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


def test_a_head_of_ours_needs_no_import(head_dir, tmp_path):
    with pytest.raises(UserError, match="is a head of eagle's own already"):
        import_head(head_dir("eagle3"), tmp_path / "out")


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
