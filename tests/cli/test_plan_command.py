"""The plan command: its bytes are those of the real extraction, its hours come from real work."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from eagle_cli.main import main
from eagle_train import trial
from eagle_train.config import Recipe
from eagle_train.estimate import _training, estimate
from eagle_train.progress import bytes_text
from eagle_train.recipe_files import load_recipe
from eagle_train.targets.extract import extract
from eagle_train.targets.survey import survey
from eagle_train.training.loop import train
from eagle_train.training.session import Session


def _plan(rows: Path, target: Path, *overrides: str, **more: Any) -> dict[str, Any]:
    recipe: Recipe = load_recipe("eagle3-tiny", overrides)
    return estimate(rows, str(target), recipe, device="cpu", **{"seconds": 0, **more})


def count_calls(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, calls: list[Any]) -> None:
    """Let the arguments of every call of `owner.name` be added to `calls`."""
    real = getattr(owner, name)
    monkeypatch.setattr(owner, name, lambda *given, **more: (calls.append(given), real(*given, **more))[1])


@pytest.mark.parametrize("codec", ["bf16", "fp32", "fp8", "int8"])
def test_bytes_are_those_of_the_real_extraction_within_two_percent(
    tiny_rows_dir: Path, tiny_target_dir: Path, tmp_path: Path, codec: str
) -> None:
    found = _plan(tiny_rows_dir, tiny_target_dir, codec=codec)
    made = extract(tiny_rows_dir, tiny_target_dir, tmp_path / "out", codec=codec, device="cpu", show=False)
    size = sum(file.stat().st_size for file in (tmp_path / "out").iterdir())
    assert found["bytes"][codec] == pytest.approx(size, rel=0.02)
    assert (found["tokens"], found["labels"], found["shards"]) == (
        made["tokens"],
        made["labels"],
        made["shards"],
    )


def test_eagle1_shards_are_sized_too(tiny_rows_dir: Path, tiny_target_dir: Path, tmp_path: Path) -> None:
    found = estimate(tiny_rows_dir, str(tiny_target_dir), load_recipe("eagle1"), device="cpu", seconds=0)
    extract(tiny_rows_dir, tiny_target_dir, tmp_path / "out", features="eagle1", device="cpu", show=False)
    size = sum(file.stat().st_size for file in (tmp_path / "out").iterdir())
    assert found["bytes"]["bf16"] == pytest.approx(size, rel=0.02)


def test_the_head_is_counted_as_it_is_trained(
    tiny_rows_dir: Path, tiny_target_dir: Path, tiny_shards_dir: Path, tmp_path: Path
) -> None:
    found = _plan(tiny_rows_dir, tiny_target_dir)
    made = train(tiny_shards_dir, load_recipe("eagle3-tiny", ["run.steps=1"]), tmp_path / "run", show=False)
    assert found["memory"]["head_parameters"] == made["num_parameters"]
    embedding = 300 * 32 * 4
    assert 0 <= found["memory"]["training"] - 16 * made["num_parameters"] - embedding < 4000  # the config
    assert found["hours"] is None


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (["run.steps=null", "run.tokens=5000"], 5000),
        (["run.steps=null", "run.epochs=3", "data.held_out=0"], 3 * 3371),
        (["run.steps=null", "run.minutes=1"], None),
    ],
)
def test_the_recipes_budget_in_tokens(
    tiny_rows_dir: Path, tiny_target_dir: Path, overrides: list[str], expected: int | None
) -> None:
    assert _plan(tiny_rows_dir, tiny_target_dir, *overrides)["train_tokens"] == expected


def test_steps_are_counted_in_the_tokens_of_their_windows(
    tiny_rows_dir: Path, tiny_target_dir: Path, tiny_shards_dir: Path, tmp_path: Path
) -> None:
    found = _plan(tiny_rows_dir, tiny_target_dir, "run.steps=5")
    made = train(tiny_shards_dir, load_recipe("eagle3-tiny", ["run.steps=5"]), tmp_path / "run", show=False)
    assert found["train_tokens"] == made["tokens"]


def test_hours_come_from_trying_and_nothing_is_left_behind(
    tiny_rows_dir: Path, tiny_target_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    plainly = ["run.steps=1000", "data.held_out=0", "run.save_every=1000"]
    found = _plan(tiny_rows_dir, tiny_target_dir, *plainly, seconds=0.5, processes=4)
    rate, trained = found["extract_tokens_per_second_of_a_worker"], found["train_tokens_per_second"]
    assert rate > 100
    assert trained > 100
    starts = found["start_seconds"]
    assert found["hours"]["extract"] == pytest.approx((3371 / rate / 4 + starts["extract"]) / 3600)
    assert found["hours"]["train"] == pytest.approx(
        (found["train_tokens"] / trained + starts["train"]) / 3600
    )
    assert 0 < starts["train"] < 60
    assert 0 < starts["extract"] < 60
    assert list(tmp_path.iterdir()) == []


def test_training_is_told_with_its_evaluations_and_checkpoints(
    tiny_rows_dir: Path,
    tiny_target_dir: Path,
    tiny_shards_dir: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    recipe = load_recipe("eagle3-tiny", ["run.steps=7", "run.eval_every=2", "run.save_every=3"])
    told = _training(survey(tiny_rows_dir, str(tiny_target_dir), None, device="cpu"), recipe, tiny_rows_dir)
    evaluations: list[Any] = []
    count_calls(monkeypatch, Session, "evaluate", evaluations)
    made = train(tiny_shards_dir, recipe, tmp_path / "run", show=False)
    assert (told.tokens, told.evaluations) == (made["tokens"], len(evaluations)) == (made["tokens"], 5)
    assert told.checkpoints == len({2, 3, 4, 6})
    tried = trial.Tried(rate=100.0, start=5.0, share=0.5, evaluation=50.0, saving=2.0)
    seconds = 5 + made["tokens"] / 100 + 5 * told.held_out / 50 + 4 * 2
    assert told.held_out > 0
    assert told.hours(tried, 1.0) == pytest.approx(seconds / 3600)
    assert told.hours(tried, 0.5) == pytest.approx(seconds / 7200)
    clock = replace(told, minutes=0.01)
    assert clock.hours(tried, 0.5) == pytest.approx((0.6 + 0.5 * (5 + told.held_out / 50)) / 3600)


@pytest.mark.parametrize(
    "budget", ["run.steps=1000000000", "run.epochs=1000000000", "run.tokens=9000000000000000"]
)
def test_a_huge_budget_is_told_like_any_other(
    tiny_rows_dir: Path, tiny_target_dir: Path, budget: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("eagle_train.shards.sampler._FEW_ROWS", 100)
    assert _plan(tiny_rows_dir, tiny_target_dir, "run.steps=null", budget)["train_tokens"] > 10**10


def test_a_slow_machine_tries_one_batch_and_one_short_step(
    tiny_rows_dir: Path,
    tiny_target_dir: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    tried: dict[str, list[Any]] = {"_run": [], "open_session": []}
    for name in tried:
        count_calls(monkeypatch, trial, name, tried[name])
    _plan(tiny_rows_dir, tiny_target_dir, "data.tokens_per_step=100000", seconds=1e-6)
    assert len(tried["_run"]) == 1
    data = tried["open_session"][0][2].data
    assert data.tokens_per_step == data.micro_tokens == 1  # what extraction does in so short a time
    said = capsys.readouterr().err.splitlines()
    assert [line.split(" for about ")[0].split("; ")[-1] for line in said if line.startswith("plan: ")] == [
        "plan: trying extraction",
        "trying training",
    ]


def test_a_busy_machine_is_said_and_left_out_of_the_second_figure(
    tiny_rows_dir: Path, tiny_target_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from eagle_cli.plan import _lines

    for share, said in ((0.5, True), (1.0, False)):
        monkeypatch.setattr("time.thread_time", lambda share=share: share * time.perf_counter())
        found = _plan(tiny_rows_dir, tiny_target_dir, "run.steps=1000", seconds=0.2)
        assert found["share_of_a_core"] == pytest.approx({"extract": share, "train": share}, rel=1e-3)
        for stage, hours in found["hours"].items():
            assert found["hours_if_free"][stage] == pytest.approx(hours * share, rel=1e-3)
        assert (
            any(line.startswith("busy: other work left this process 50% ") for line in _lines(found)) is said
        )


def test_it_prints_what_it_found_and_the_next_command(
    tiny_rows_dir: Path, tiny_target_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["plan", str(tiny_rows_dir), "--target", str(tiny_target_dir), "--recipe", "eagle3-tiny"]
    for more in (["--seconds", "0"], ["--seconds", "0", "--json"]):
        with pytest.raises(SystemExit) as caught:
            main([*arguments, "--device", "cpu", *more])
        assert not caught.value.code
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "24 rows, 3,371 tokens, 1,441 supervised: 1 shard"
    assert lines[1].startswith("disk by codec: bf16 ")
    target_bytes = json.loads(lines[-1])["target_bytes"]
    assert 0 < target_bytes - 300 * 32 * 4 < 4000  # the config
    assert lines[1].endswith(f"; {bytes_text(target_bytes)} of each is the target's embedding and lm_head")
    extract_it = f"next: eagle extract {tiny_rows_dir} --target {tiny_target_dir} --for eagle3"
    assert lines[-2] == f"{extract_it} --layers 2,4,5 --codec bf16 --out shards/"
    assert json.loads(lines[-1])["tokens"] == 3371
