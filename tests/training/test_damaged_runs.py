"""A run's folder that is not what training left: named in one line, passed over where that is safe."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from eagle_train.errors import UserError
from eagle_train.training import checkpoints
from eagle_train.training.engine import Engine


def test_a_run_whose_folder_is_removed_meanwhile_ends_at_its_next_save(tmp_path, train_tiny, monkeypatch):
    run, accumulate = tmp_path / "run", Engine.accumulate

    def removing(self, *given):
        shutil.rmtree(run, ignore_errors=True)
        return accumulate(self, *given)

    monkeypatch.setattr(Engine, "accumulate", removing)
    with pytest.raises(UserError, match=r"run: recipe\.yaml and run\.json gone since the run began"):
        train_tiny("run")
    assert not run.exists()


@pytest.mark.parametrize("name", ["best", "last"])
def test_a_folder_in_the_place_of_a_link_is_to_be_removed(name, tmp_path, train_tiny):
    link = tmp_path / "run" / name
    link.mkdir(parents=True)
    with pytest.raises(UserError, match=f"{link}: a folder, .*; remove {link}$"):
        train_tiny("run")
    with pytest.raises(UserError, match=f"{link}: a folder, .*; remove {link}$"):
        checkpoints._link(link, Path("checkpoints/step-000001"))
    assert sorted(path.name for path in link.parent.iterdir()) == [name]


def test_a_damaged_checkpoint_is_passed_over_in_one_line(tmp_path, train_tiny, capsys):
    run = tmp_path / "run"
    train_tiny("run")
    good = checkpoints.newest(run)

    def broken(step, file, change):
        copy = shutil.copytree(good, run / f"checkpoints/step-{step:06d}")
        record = json.loads((copy / "trainer.json").read_text())
        record["state"]["step"] = step
        (copy / "trainer.json").write_text(json.dumps(record))
        change(copy / file)

    def flip(file):
        content = bytearray(file.read_bytes())
        content[len(content) // 2] ^= 1
        file.write_bytes(content)

    def without_step(file):
        record = json.loads(file.read_text())
        del record["state"]["tokens"]
        file.write_text(json.dumps(record))

    broken(900, "trainer.json", Path.unlink)
    broken(901, "model.safetensors", Path.unlink)
    broken(902, "trainer.safetensors", flip)
    broken(903, "trainer.json", without_step)
    shutil.copytree(good, run / "checkpoints/.step-000950.1.tmp")
    capsys.readouterr()
    assert checkpoints.newest(run) == good
    words = capsys.readouterr().err
    assert words.count("\n") == 1
    assert words.startswith(f"{run}: going on from step-000008: ")
    for fault in (
        "step-000903 is damaged (trainer.json: tokens: got None, wanted int)",
        "step-000902 is damaged (trainer.safetensors is not what was written)",
        "step-000901 is damaged (model.safetensors is missing)",
        "step-000900 is damaged (trainer.json: not found",
    ):
        assert fault in words
    assert train_tiny("run", "run.steps=9", resume=True)["steps"] == 9
    assert sorted(p.name for p in (run / "checkpoints").iterdir())[-2:] == ["step-000008", "step-000009"]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"step": "8"}, "step: got '8', wanted int"),
        ({"seconds": None}, "seconds: got None, wanted float"),
        ({"best_tau": True}, "best_tau: got True, wanted float | None"),
        ({"step": -5}, "step: wanted a number of 0 or more"),
        ({"step": 7}, "step: got 7, wanted that of its folder, step-000002"),
        ({"seconds": float("nan")}, "seconds: wanted a number of 0 or more"),
        ({"best_tau": 1.5}, "got best_tau 1.5 and best_step None, wanted both or none"),
        ({"evaluated_step": 2}, "got tau None and evaluated_step 2, wanted both or none"),
        ({"tokens": 10**400}, "tokens: wanted a number of 0 or more, below 2**63"),
        (None, "lacks its state or its files"),
    ],
)
def test_a_run_whose_every_checkpoint_is_damaged_is_one_line(change, words, tmp_path, train_tiny):
    run = tmp_path / "run"
    train_tiny("run", "run.steps=2", "run.keep_last=1", "data.held_out=0")
    file = run / "last" / "trainer.json"
    record = json.loads(file.read_text())
    record["state"] = None if change is None else record["state"] | change
    file.write_text(json.dumps(record))
    before = {p: p.read_bytes() for p in run.rglob("*") if p.is_file()}
    with pytest.raises(UserError, match="no checkpoint is whole: step-000002 is damaged") as caught:
        train_tiny("run", "run.steps=2", "run.keep_last=1", "data.held_out=0")
    assert words in str(caught.value)
    assert {p: p.read_bytes() for p in run.rglob("*") if p.is_file()} == before


def test_names_that_are_no_checkpoints_are_left_alone(tmp_path, train_tiny):
    run = tmp_path / "run"
    train_tiny("run", "run.steps=2", "data.held_out=0")
    for name in ("step-\u00b2", "step-\u0663", "step-9", "step-"):
        (run / "checkpoints" / name).mkdir()
    assert checkpoints.newest(run).name == "step-000002"
    (run / "metrics.jsonl").unlink()
    (run / "metrics.jsonl").mkdir()
    with pytest.raises(UserError, match=r"metrics\.jsonl: Is a directory"):
        train_tiny("run", "run.steps=3", "data.held_out=0", resume=True)
    (run / "recipe.yaml").write_text("")
    with pytest.raises(UserError, match=r"recipe\.yaml: damaged \(.*run: no end"):
        train_tiny("run", "run.steps=3", "data.held_out=0", resume=True)
