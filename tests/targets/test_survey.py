"""What is known before any work: sizes, workers, threads."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from eagle_cli.main import main
from eagle_train.progress import bytes_text
from eagle_train.targets import survey as room
from eagle_train.targets.extract import extract
from eagle_train.targets.load import load_target
from eagle_train.targets.survey import Survey, default_processes, survey

GIB = 1 << 30


@pytest.fixture
def work(tiny_rows_dir: Path, tiny_target_dir: Path, tmp_path: Path) -> Survey:
    return survey(
        tiny_rows_dir,
        str(tiny_target_dir),
        tmp_path / "out",
        batch_tokens=256,
        shard_tokens=512,
        device="cpu",
    )


def test_parameters_are_counted_without_loading_them(work: Survey, tiny_target_dir: Path) -> None:
    model = load_target(tiny_target_dir, device="cpu").model
    assert work.num_parameters == sum(parameter.numel() for parameter in model.parameters())
    assert work.weights_bytes == 4 * work.num_parameters


def test_the_plan_before_loading_is_the_plan_of_the_work(
    work: Survey, tiny_rows_dir: Path, tiny_target_dir: Path, tmp_path: Path
) -> None:
    made = extract(
        tiny_rows_dir,
        tiny_target_dir,
        tmp_path / "out",
        batch_tokens=256,
        shard_tokens=512,
        device="cpu",
        show=False,
    )
    assert (made["rows"], made["tokens"], made["shards"]) == (24, work.plan.tokens, len(work.plan.shards))


@pytest.mark.parametrize(
    ("cores", "memory", "expected"),
    [
        (4, 64 * GIB, 4),  # one a core
        (4, int(6.2 * GIB), 2),  # as many as fit: 1.2 x 1.6 GiB of weights and 1 GiB each
        (4, GIB, 1),
        (64, 640 * GIB, 7),  # no more than shards
    ],
)
def test_workers_on_a_cpu_are_as_many_as_cores_memory_and_shards_allow(
    work: Survey, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cores: int, memory: int, expected: int
) -> None:
    monkeypatch.setattr(room, "num_cores", lambda: cores)
    monkeypatch.setattr(room, "free_memory", lambda: memory)
    large = replace(work, num_parameters=430_000_000, weights_bytes=1_720_000_000)
    assert len(work.plan.shards) == 7
    assert default_processes(large, tmp_path / "out") == expected


def test_small_work_is_done_by_one_worker(
    work: Survey, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(room, "num_cores", lambda: 4)
    assert default_processes(work, tmp_path / "out") == 1


def test_one_worker_for_each_gpu(work: Survey, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    large = replace(work, num_parameters=10**9, device=torch.device("cuda"))
    assert default_processes(large, tmp_path / "out") == 4


def test_cores_that_memory_leaves_without_a_worker_become_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(room, "num_cores", lambda: 16)
    monkeypatch.setattr(room, "total_memory", lambda: 72 * GIB)
    monkeypatch.setattr(room, "free_memory", lambda: GIB)  # of the moment: not to be in a plan
    cpu = torch.device("cpu")
    assert room._default_threads(cpu, GIB) == 1
    assert room._default_threads(cpu, 14 * GIB) == 4  # four workers fit
    assert room._default_threads(cpu, 200 * GIB) == 16


def test_bytes_are_said_in_units_people_read() -> None:
    assert [bytes_text(n) for n in (12, 2048, 3 * 2**20, 5 * GIB, 3 * 2**40)] == [
        "12 bytes",
        "2.0 KiB",
        "3.0 MiB",
        "5.0 GiB",
        "3.00 TiB",
    ]


@pytest.mark.parametrize(
    "words",
    [
        ["extract", "--layers", "2,4,99"],
        ["plan", "--recipe", "eagle3-tiny", "--set", "head.layer_ids=[2,4,99]"],
        ["train", "--online", "--recipe", "eagle3-tiny", "--set", "head.layer_ids=[2,4,99]"],
        ["train", "--max-disk", "1GB", "--recipe", "eagle3-tiny", "--set", "head.layer_ids=[2,4,99]"],
    ],
)
def test_a_layer_that_the_target_lacks_is_named_alike_by_all_that_read_rows(
    words: list[str], tiny_rows_dir: Path, tiny_target_dir: Path, tmp_path: Path, capsys: Any
) -> None:
    words = [words[0], str(tiny_rows_dir), "--target", str(tiny_target_dir), *words[1:]]
    if words[0] != "plan":
        words += ["--out", str(tmp_path / "out")]
    if "--max-disk" in words:
        words += ["--set", "run.epochs=1", "--set", "run.steps=null"]
    with pytest.raises(SystemExit) as left:
        main(words)
    assert left.value.code == 2
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.startswith(
        "error: layers 2, 4, 99: wanted ascending distinct numbers in 0..7 (k = the residual"
    )
