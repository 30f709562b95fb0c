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
from eagle_train.targets.extract import extract
from eagle_train.targets.load import load_target
from eagle_train.training.loop import train
from eagle_train.training.trained_on import trained_on

Tiny = Callable[..., Recipe]


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


def test_a_run_and_its_export_know_the_weights(run: Path, tmp_path: Path, tiny_target_dir: Path) -> None:
    export(run, tmp_path / "head", engine="vllm")
    fingerprint = load_target(tiny_target_dir, device="cpu").fingerprint
    for head in (run, run / "best", tmp_path / "head"):
        known = trained_on(head)
        assert known is not None
        assert Path(known["name"]).name == tiny_target_dir.name
        assert known["fingerprint"] == fingerprint
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
    assert predict(run, other_shards, other_target=True, show=False, device="cpu")["rows"] == 24


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
