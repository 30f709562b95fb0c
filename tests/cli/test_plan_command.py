"""The plan command: its bytes are those of the real extraction, its hours come from real work."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest

from eagle_cli.main import main
from eagle_train import estimate as module
from eagle_train.config import Recipe
from eagle_train.estimate import estimate
from eagle_train.recipe_files import load_recipe
from eagle_train.targets.extract import extract
from eagle_train.training.loop import train


def _plan(rows: Path, target: Path, *overrides: str, **more: Any) -> dict[str, Any]:
    recipe: Recipe = load_recipe("eagle3-tiny", overrides)
    return estimate(rows, str(target), recipe, device="cpu", **{"seconds": 0, **more})


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
    found = _plan(tiny_rows_dir, tiny_target_dir, "run.steps=1000", seconds=0.5, processes=4)
    rate, trained = found["extract_tokens_per_second_of_a_worker"], found["train_tokens_per_second"]
    assert rate > 100
    assert trained > 100
    assert 0 < found["hours"]["extract"] - 3371 / rate / 4 / 3600 < 60 / 3600  # the check at the start
    assert found["hours"]["train"] == pytest.approx(found["train_tokens"] / trained / 3600)
    assert list(tmp_path.iterdir()) == []


def test_a_slow_machine_tries_one_batch_and_one_short_step(
    tiny_rows_dir: Path,
    tiny_target_dir: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    tried: dict[str, list[Any]] = {"_run": [], "train": []}

    def counting(name: str, real: Any) -> None:
        monkeypatch.setattr(
            module, name, lambda *given, **more: (tried[name].append(given), real(*given, **more))[1]
        )

    for name in tried:
        counting(name, getattr(module, name))
    _plan(tiny_rows_dir, tiny_target_dir, "data.tokens_per_step=100000", seconds=1e-6)
    assert len(tried["_run"]) == 1
    data = tried["train"][0][1].data
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
    extract_it = f"next: eagle extract {tiny_rows_dir} --target {tiny_target_dir} --for eagle3"
    assert lines[-2] == f"{extract_it} --layers 2,4,5 --codec bf16 --out shards/"
    assert json.loads(lines[-1])["tokens"] == 3371
