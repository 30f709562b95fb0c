"""A head of a target with the same shapes but other weights is told from its own, in one line."""

from __future__ import annotations

import json
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from eagle_train.config import Recipe
from eagle_train.errors import UserError
from eagle_train.evaluation.heads import open_head
from eagle_train.evaluation.predict import predict
from eagle_train.export.export import export
from eagle_train.export.importing import import_head
from eagle_train.shards import upkeep
from eagle_train.shards.reader import open_shards
from eagle_train.targets.extract import extract
from eagle_train.targets.load import load_target
from eagle_train.training.held_out import split
from eagle_train.training.loop import train
from eagle_train.training.source import LiveTarget
from eagle_train.training.trained_on import rows_not_trained_on, trained_on

Tiny = Callable[..., Recipe]
HELD = "held out from training"


@pytest.fixture(scope="module")
def other_target(tmp_path_factory: pytest.TempPathFactory, make_tiny_target: Callable[..., Path]) -> Path:
    return make_tiny_target(tmp_path_factory.mktemp("other") / "tiny-llama", seed=7)


@pytest.fixture(scope="module")
def other_shards(tmp_path_factory: pytest.TempPathFactory, tiny_rows_dir: Path, other_target: Path) -> Path:
    out = tmp_path_factory.mktemp("other-shards") / "shards"
    extract(tiny_rows_dir, other_target, out, codec="fp32", dtype="fp32", device="cpu", show=False)
    return out


@pytest.fixture
def run(tmp_path: Path, tiny: Tiny, tiny_shards_dir: Path) -> Path:
    train(tiny_shards_dir, tiny("run.steps=1"), tmp_path / "run", show=False)
    return tmp_path / "run"


def test_a_run_and_what_is_made_of_it_know_the_weights(
    run: Path, tmp_path: Path, tiny_target_dir: Path
) -> None:
    export(run, tmp_path / "head", engine="vllm")
    fingerprint = load_target(tiny_target_dir, device="cpu").fingerprint
    for head in (run, run / "best", tmp_path / "head"):
        known = trained_on(head)
        assert known is not None
        assert Path(known["name"]).name == tiny_target_dir.name
        assert known["fingerprint"] == fingerprint
    export(run, tmp_path / "renamed", engine="speculators", target="owner/name")
    export(tmp_path / "renamed", tmp_path / "again", engine="vllm")
    import_head(tmp_path / "again", tmp_path / "imported")
    for head in ("renamed", "again", "imported"):
        named = trained_on(tmp_path / head)
        assert named is not None
        assert (named["name"], named["fingerprint"]) == ("owner/name", fingerprint)
    alone = shutil.copytree((run / "best").resolve(), tmp_path / "alone")
    assert trained_on(alone) is None


def test_starting_from_it_is_refused_unless_told(
    run: Path, tmp_path: Path, tiny: Tiny, other_shards: Path, other_target: Path
) -> None:
    with pytest.raises(UserError) as caught:
        train(other_shards, tiny("run.steps=1"), tmp_path / "new", init_from=str(run), show=False)
    assert str(caught.value).startswith(f"--init-from {run}: trained on ")
    assert f"not on the weights of {other_target} (" in str(caught.value)
    recipe = tiny("run.steps=1", "run.other_target=true")
    assert train(other_shards, recipe, tmp_path / "new", init_from=str(run), show=False)["steps"] == 1


def test_predicting_with_it_is_refused_unless_told(
    run: Path, tiny_shards_dir: Path, other_shards: Path
) -> None:
    own: dict[str, Any] = predict(run, tiny_shards_dir, show=False, device="cpu")
    assert own["tau"] >= 1
    with pytest.raises(UserError, match=r"trained on .* give --other-target to predict all the same"):
        predict(run, other_shards, show=False, device="cpu")
    told = predict(run, other_shards, other_target=True, show=False, device="cpu")
    assert (told["rows"], told["which_rows"]) == (own["rows"], HELD)


def test_predicting_on_texts_is_refused_before_the_targets_features_are_taken(
    run: Path, tmp_path: Path, other_target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("eagle_train.evaluation.predict.extract", lambda *_, **__: pytest.fail("extracted"))
    monkeypatch.setattr("eagle_train.evaluation.predict.prepare", lambda *_, **__: pytest.fail("prepared"))
    (tmp_path / "texts.jsonl").write_text("{}\n")
    with pytest.raises(UserError, match=r"trained on .* give --other-target to predict all the same"):
        predict(run, tmp_path / "texts.jsonl", str(other_target), show=False, device="cpu")


def test_evaluating_it_warns(run: Path, tiny_target_dir: Path, other_target: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        open_head(run, load_target(tiny_target_dir, device="cpu"))
    with pytest.warns(UserWarning, match=r"trained on .* expect a shorter acceptance length"):
        open_head(run, load_target(other_target, device="cpu"))


def test_a_record_that_says_nothing_is_no_reason_to_refuse(run: Path) -> None:
    record = json.loads((run / "run.json").read_text())
    (run / "run.json").write_text(json.dumps({**record, "target": {"name": "x"}}))
    assert trained_on(run) is None


def read_by(run: Path, shards: Path) -> tuple[set[str], str]:
    """The conversations that an evaluation of `run` reads of `shards`, and how it calls them."""
    source = open_shards(shards)
    rows, words = rows_not_trained_on(run, source)
    return {source.conversation_ids[row] for row in rows}, words


@pytest.mark.parametrize("how", ["shards", "online", "part"])
def test_what_was_held_out_is_known_in_every_form_of_the_rows(
    how: str, tmp_path: Path, tiny: Tiny, tiny_shards_dir: Path, tiny_rows_dir: Path, tiny_target_dir: Path
) -> None:
    """Parts, parts put together again, labels of another form; a run on some of them or on rows."""
    upkeep.split(tiny_shards_dir, tmp_path / "parts", 2, show=False)
    parts = [tmp_path / "parts" / f"part-{i}" for i in (0, 1)]
    upkeep.merge(parts, tmp_path / "merged", show=False)
    given: dict[str, Any] = {"codec": "fp32", "dtype": "fp32", "device": "cpu", "show": False}
    extract(tiny_rows_dir, tiny_target_dir, tmp_path / "top", label_top_k=4, **given)
    place = {"shards": tiny_shards_dir, "online": tiny_rows_dir, "part": parts[0]}[how]
    live = LiveTarget(str(tiny_target_dir), "fp32") if how == "online" else None
    run = tmp_path / "run"
    train(place, tiny("run.steps=1", "data.held_out=8"), run, live=live, show=False)
    trained, held = (
        {ids[row] for row in side}
        for ids in [open_shards(parts[0] if how == "part" else tiny_shards_dir).conversation_ids]
        for side in split(ids, 8)
    )
    for shards in (tiny_shards_dir, tmp_path / "merged", tmp_path / "top", *parts):
        found, words = read_by(run, shards)
        there = set(open_shards(shards).conversation_ids)
        assert words == HELD
        assert found >= held & there
        assert not found & trained
    with_none_held_out = tmp_path / "all"
    train(place, tiny("run.steps=1", "data.held_out=0"), with_none_held_out, live=live, show=False)
    assert read_by(with_none_held_out, parts[0])[1].endswith("also those trained on")


def test_a_run_that_did_not_record_what_it_held_out(run: Path, tmp_path: Path, tiny_shards_dir: Path) -> None:
    """The same rows in full are split the same again; a part of them is not, and this is said."""
    known = read_by(run, tiny_shards_dir)
    record = json.loads((run / "run.json").read_text())
    for name in ("held_out_to", "plans"):
        del record[name]
    record["shards"] = "0" * 16 + "-24"  # as of shards with labels of another form
    (run / "run.json").write_text(json.dumps(record))
    assert read_by(run, tiny_shards_dir) == known
    assert known[1] == HELD
    upkeep.split(tiny_shards_dir, tmp_path / "parts", 2, show=False)
    words = read_by(run, tmp_path / "parts" / "part-0")[1]
    assert words == "all, also those trained on; the run does not tell which it held out"
    (run / "run.json").write_text(json.dumps({**record, "rows_fingerprint": "other"}))
    assert read_by(run, tiny_shards_dir)[1].startswith("all; of other data than the run's, whether it was")
    assert read_by(tmp_path, tiny_shards_dir)[1].startswith("all; no record tells")
