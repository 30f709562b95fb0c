"""The extract command: what it says, its exit codes, and what an interrupt leaves behind."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from eagle_cli.main import main
from eagle_train.shards import upkeep
from eagle_train.shards.schema import shard_name
from eagle_train.targets import extract as room

_FLAGS = ["--batch-tokens", "256", "--shard-tokens", "512", "--device", "cpu", "--processes", "1"]


def _run(*arguments: str | Path) -> int:
    with pytest.raises(SystemExit) as caught:
        main(["extract", *map(str, arguments)])
    return int(caught.value.code or 0)


def test_it_reports_sizes_first_and_the_next_command_last(
    tiny_rows_dir: Path, tiny_target_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    assert _run(tiny_rows_dir, "--target", tiny_target_dir, "--out", out, *_FLAGS) == 0
    said = capsys.readouterr()
    sizes = said.err.splitlines()[0]
    assert sizes.startswith("24 rows, 3,371 tokens, 1,441 supervised: 7 shards, ")
    assert "KiB on disk (0.2 KiB a token, bf16), and " in sizes
    assert sizes.endswith(" KiB of the target's embedding and lm_head")
    assert said.out.startswith(f"{out}: 24 rows, 3,371 tokens, 1,441 supervised, 7 shards, ")
    assert re.search(r"extract: \d+\.\d% of the time was spent waiting for the disk", said.err)
    assert said.out.splitlines()[-1] == f"next: eagle train {out} --recipe eagle3-smollm2 --out run/"


def test_json_is_all_there_is_on_stdout(
    tiny_rows_dir: Path, tiny_target_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    more = ["--for", "eagle1", "--codec", "fp32", "--json"]
    assert _run(tiny_rows_dir, "--target", tiny_target_dir, "--out", out, *more, *_FLAGS) == 0
    summary = json.loads(capsys.readouterr().out)
    assert (summary["features"], summary["codec"], summary["layer_ids"]) == ("eagle1", "fp32", [])
    assert summary["complete"] is True
    assert summary["target_bytes"] == (out / "target.safetensors").stat().st_size
    assert summary["bytes"] == sum(file.stat().st_size for file in out.glob("shard-*.safetensors"))


def test_the_size_said_beforehand_is_that_of_the_files(tiny_shards_dir: Path) -> None:
    plan = json.loads((tiny_shards_dir / "plan.json").read_text())
    on_disk = sum(file.stat().st_size for file in tiny_shards_dir.glob("shard-*.safetensors"))
    assert plan["bytes"] < on_disk < plan["bytes"] + 3000 * len(plan["shards"])  # headers


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--layers", "٢,3"], "error: --layers ٢,3: wanted numbers of layers, such as 2,16,29"),
        (["--layers", "2;3"], "error: --layers 2;3: wanted numbers of layers, such as 2,16,29"),
        (
            ["--codec", "bf61"],
            "error: --codec bf61: wanted one of bf16, fp32, fp8, int8; did you mean 'bf16'?",
        ),
        (["--processes", "0"], "error: --processes 0: wanted 1 or more"),
        (
            ["--processes", "2", "--device-map", "auto"],
            "error: --processes 2: with --device-map auto one process holds the whole model; "
            "leave one of the two out",
        ),
        (["--device", "cuda"], "error: --device cuda: no CUDA device is visible here; use --device cpu"),
        (["--device", "cpu:x"], "error: --device cpu:x: wanted cpu, cuda or cuda:N"),
    ],
)
def test_a_wrong_option_is_one_line_and_exit_2(
    tiny_rows_dir: Path,
    tiny_target_dir: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    words: str,
) -> None:
    out = tmp_path / "out"
    assert _run(tiny_rows_dir, "--target", tiny_target_dir, "--out", out, "--device", "cpu", *arguments) == 2
    assert capsys.readouterr().err.strip().splitlines()[-1] == words
    assert not out.exists()


def test_processes_inside_torchrun_are_refused(
    tiny_rows_dir: Path,
    tiny_target_dir: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    out = tmp_path / "out"
    assert _run(tiny_rows_dir, "--target", tiny_target_dir, "--out", out, "--processes", "2") == 2
    assert capsys.readouterr().err == ("error: --processes 2: given inside torchrun; use one of the two\n")
    assert not out.exists()


def test_missing_rows_are_named(
    tiny_target_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert _run(tmp_path / "none", "--target", tiny_target_dir, "--out", tmp_path / "out") == 2
    assert capsys.readouterr().err.startswith(f"error: {tmp_path}/none/rows.json: not found")
    assert not (tmp_path / "out").exists()


def test_a_hub_that_does_not_answer_is_one_line(tiny_rows_dir: Path, tmp_path: Path) -> None:
    arguments = ["extract", str(tiny_rows_dir), "--target", "nobody/nothing", "--out", str(tmp_path / "out")]
    ran = subprocess.run(
        [sys.executable, "-m", "eagle_cli.main", *arguments],
        env={**os.environ, "HF_ENDPOINT": "http://127.0.0.1:9", "HF_HOME": str(tmp_path / "empty")},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert ran.returncode == 2
    (line,) = ran.stderr.splitlines()
    assert line.startswith("error: nobody/nothing: could not be loaded as a causal language model: ")
    assert "http://127.0.0.1:9 does not answer" in line


def test_an_interrupt_keeps_finished_shards_and_the_same_command_goes_on(
    tiny_rows_dir: Path,
    tiny_target_dir: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    out = tmp_path / "out"
    arguments = [tiny_rows_dir, "--target", tiny_target_dir, "--out", out, *_FLAGS]
    own, calls = room.run_batch, []

    def interrupted(*more: Any) -> Any:
        calls.append(1)
        if len(calls) == 8:
            raise KeyboardInterrupt
        return own(*more)

    monkeypatch.setattr(room, "run_batch", interrupted)
    assert _run(*arguments) == 130
    capsys.readouterr()
    kept = sorted(file.name for file in out.iterdir())
    batches = [len(shard["batches"]) for shard in json.loads((out / "plan.json").read_text())["shards"]]
    finished = [n for n in range(len(batches)) if sum(batches[: n + 1]) <= 7]
    assert 0 < len(finished) < len(batches)
    assert [name for name in kept if name.startswith("shard-")] == [shard_name(n) for n in finished]
    assert not [name for name in kept if name.startswith(".") or name == "shards.json"]
    monkeypatch.setattr(room, "run_batch", own)
    assert _run(*arguments, "--json") == 0
    assert json.loads(capsys.readouterr().out)["shards_done_here"] == len(batches) - len(finished)
    assert upkeep.verify(out, show=False)["faults"] == []
