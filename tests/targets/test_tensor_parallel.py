"""A target in two processes: the features of one, its identity bit by bit, refusals, and how it all ends."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers

from eagle_train.errors import UserError
from eagle_train.estimate import estimate
from eagle_train.io.tensors import load_tensors
from eagle_train.recipe_files import load_recipe
from eagle_train.shards.listing import read_manifest
from eagle_train.shards.schema import Plan
from eagle_train.targets import checkpoint, plans, tensor_parallel_options, workers
from eagle_train.targets.extract import extract
from eagle_train.training.loop import train

from . import cut_in_two
from .cut_in_two import CASES, SETTINGS
from .processes import worker_of
from .small import bytes_of, shards_in


@pytest.fixture(scope="module")
def targets(
    tmp_path_factory: pytest.TempPathFactory, tiny_target_dir: Path, make_tiny_target: Callable[..., Path]
) -> Path:
    """A folder with a tied target, one that is not, and one whose plan does not fit its norms."""
    folder = tmp_path_factory.mktemp("targets")
    for name in ("tied", "miscut"):
        (folder / name).symlink_to(tiny_target_dir)
    make_tiny_target(folder / "untied", tied=False)
    sizes = {"vocab_size": 300, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 8}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "use_qk_norm": True}
    config = transformers.CohereConfig(**sizes, **heads, pad_token_id=2, bos_token_id=None, eos_token_id=2)
    transformers.CohereForCausalLM(config).save_pretrained(folder / "unfit")
    for file in tiny_target_dir.glob("*"):
        if "token" in file.name or file.name.startswith("chat_template"):
            (folder / "unfit" / file.name).write_bytes(file.read_bytes())
    return folder


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory, tiny_rows_dir: Path, targets: Path) -> SimpleNamespace:
    """Every case by two processes (`two`) and by one (`one`); what the launch wrote and how it ended."""
    out = tmp_path_factory.mktemp("cut")
    words = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    words += [str(Path(cut_in_two.__file__)), str(tiny_rows_dir), str(targets), str(out / "two")]
    (out / "two").mkdir()
    child = subprocess.Popen([sys.executable, *words], stderr=subprocess.PIPE, text=True)
    for name, (target, settings) in CASES.items():
        more: dict[str, Any] = {"threads": 1, "show": False, **SETTINGS, **settings}
        extract(tiny_rows_dir, targets / target, out / "one" / name, **more)
    _, errors = child.communicate(timeout=600)
    return SimpleNamespace(one=out / "one", two=out / "two", errors=errors, code=child.returncode)


@pytest.mark.parametrize("name", ["tied", "untied", "top labels"])
def test_features_are_those_of_one_process(made: SimpleNamespace, name: str) -> None:
    one, two = made.one / name, made.two / name
    assert read_manifest(two)["tensor_parallel"] == 2, made.errors
    assert shards_in(one) == shards_in(two)
    differ = 0
    for shard in shards_in(one):
        wanted, got = (load_tensors(folder / shard)[0] for folder in (one, two))
        assert wanted.keys() == got.keys()
        for tensor, value in wanted.items():
            if not value.is_floating_point():
                assert torch.equal(got[tensor], value), tensor
                continue
            error = (got[tensor] - value).abs().max()
            assert error <= 1e-4 * value.abs().max(), tensor
            differ += int(error > 0)
    assert differ > 0, "no sum was taken over the processes"


@pytest.mark.parametrize("name", ["tied", "untied"])
def test_fingerprint_and_frozen_target_are_those_of_the_whole_model(made: SimpleNamespace, name: str) -> None:
    for file in ("target.safetensors", "target.json"):
        assert (made.two / name / file).read_bytes() == (made.one / name / file).read_bytes()
    identity = [Plan.load(folder / name).setting.target for folder in (made.one, made.two)]
    assert identity[0]["fingerprint"] == identity[1]["fingerprint"]


@pytest.mark.parametrize("name", ["tied", "untied"])
def test_each_process_holds_the_part_that_is_planned_for(
    made: SimpleNamespace, targets: Path, tiny_rows_dir: Path, name: str
) -> None:
    """About half of all; norms are there twice, as the embedding is by older versions of transformers."""
    held = json.loads((made.two / f"held-{name}.json").read_text())
    recipe = load_recipe("eagle3-tiny")
    plan = partial(estimate, tiny_rows_dir, str(targets / name), recipe, dtype="fp32", device="cpu")
    assert plan(tensor_parallel=2)["memory"]["target"] == held
    whole = plan(seconds=0)["memory"]["target"]
    config = transformers.AutoConfig.from_pretrained(targets / name)
    weights = dict(checkpoint.skeleton(config, False).named_parameters())
    twice = 4 * sum(w.numel() for key, w in weights.items() if "norm" in key or "embed" in key)
    assert whole / 2 < held < whole / 2 + twice


@pytest.mark.parametrize(
    ("style", "shape", "wanted"),
    [
        ("colwise", (7, 5), 3 * 5),
        ("colwise_gather_output", (7,), 3),
        ("rowwise", (5, 7), 5 * 3),
        ("rowwise", (7,), 7),  # a bias, added by all
        ("packed_rowwise", (4, 5, 7), 4 * 5 * 3),
        ("packed_colwise", (4, 7, 5), 4 * 3 * 5),
        ("embedding_rowwise", (7, 5), 3 * 5),
        ("embedding_colwise", (5, 7), 5 * 3),
        ("grouped_gemm", (7, 5, 2), 3 * 5 * 2),
        ("replicated_with_grad_allreduce", (7, 5), 35),
        ("", (7, 5), 35),
    ],
)
def test_the_largest_part_of_a_weight(style: str, shape: tuple[int, ...], wanted: int) -> None:
    assert plans.part_of(style, shape, 3) == wanted


def test_training_reads_them(made: SimpleNamespace, tmp_path: Path) -> None:
    steps = ["run.steps=2", "run.eval_every=2", "data.held_out=3"]
    taus = [
        train(folder / "tied", load_recipe("eagle3-tiny", steps), tmp_path / folder.name, show=False)["tau"]
        for folder in (made.one, made.two)
    ]
    assert taus[0] == taus[1]


def test_a_shard_made_again_has_the_same_bytes(made: SimpleNamespace) -> None:
    assert bytes_of(made.two / "again") == bytes_of(made.two / "tied")


def test_going_on_with_another_number_of_processes_is_refused(
    made: SimpleNamespace, targets: Path, tiny_rows_dir: Path
) -> None:
    before = bytes_of(made.two / "tied")
    more: dict[str, Any] = {"codec": "fp32", "show": False, **SETTINGS}
    with pytest.raises(UserError, match="are made with --tensor-parallel 2; this run has 0"):
        extract(tiny_rows_dir, targets / "tied", made.two / "tied", **more)
    with pytest.raises(UserError, match="are made with --tensor-parallel 0; this run has 2"):
        workers.start_workers(
            tiny_rows_dir, targets / "tied", made.one / "tied", tensor_parallel=2, **more, threads=1
        )
    assert bytes_of(made.two / "tied") == before
    assert b"tensor_parallel" not in (made.one / "tied" / "plan.json").read_bytes()
    assert "tensor_parallel" not in read_manifest(made.one / "tied")


def test_a_plan_that_computes_something_else_is_refused(made: SimpleNamespace) -> None:
    text = (made.two / "miscut.txt").read_text()
    assert "layer 4, cut by transformers' plan, gives other states than as a whole (off by" in text
    assert not (made.two / "miscut" / "plan.json").exists()


def test_what_the_first_process_raises_ends_all_and_is_said_once(made: SimpleNamespace) -> None:
    assert made.code != 0
    assert made.errors.count("unfit: transformers' plan does not suit it (The size of tensor a") == 1
    assert not (made.two / "unfit" / "plan.json").exists()


def _start(rows: Path, target: Path, out: Path, **settings: Any) -> dict[str, Any]:
    return workers.start_workers(rows, target, out, **{**SETTINGS, "show": False, **settings})


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"tensor_parallel": 1}, "--tensor-parallel 1: wanted 2 or more"),
        ({"tensor_parallel": 3}, "has 4 attention heads; wanted one of 2$"),
        ({"tensor_parallel": 4}, "has 2 key-value heads; wanted one of 2$"),
        ({"tensor_parallel": 2, "processes": 2}, "wanted no --processes 2"),
        ({"tensor_parallel": 2, "device_map": "auto"}, "with --device-map auto one process holds"),
    ],
)
def test_what_does_not_go_together_is_refused_before_anything_is_made(
    settings: dict[str, Any], words: str, tiny_rows_dir: Path, tiny_target_dir: Path, tmp_path: Path
) -> None:
    with pytest.raises(UserError, match=words):
        _start(tiny_rows_dir, tiny_target_dir, tmp_path / "out", **settings)
    assert not (tmp_path / "out").exists()


def test_a_launch_of_another_size_is_refused(
    tiny_rows_dir: Path, tiny_target_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {"RANK": "0", "WORLD_SIZE": "3"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UserError, match="torchrun started 3 processes, wanted 2"):
        _start(tiny_rows_dir, tiny_target_dir, tmp_path / "out", tensor_parallel=2)


def test_targets_that_no_plan_suits_are_refused() -> None:
    sizes = {"vocab_size": 300, "hidden_size": 32, "num_hidden_layers": 8, "num_attention_heads": 4}
    llama = transformers.LlamaConfig(**sizes, num_key_value_heads=1)
    whole = checkpoint.skeleton(llama, False)
    with pytest.raises(UserError, match="has 1 key-value head; use --device-map auto"):
        plans.check_plan("T", llama, whole, 2)
    with pytest.raises(UserError, match=r"T\.gguf is a \.gguf file, wanted weights that are not packed"):
        plans.check_plan("T.gguf", llama, whole, 2)
    llama.quantization_config = {"quant_method": "gptq"}
    with pytest.raises(UserError, match="T is quantised, wanted"):
        plans.check_plan("T", llama, whole, 2)
    gpt2 = transformers.GPT2Config(vocab_size=300, n_embd=32, n_layer=8, n_head=4)
    with pytest.raises(UserError, match="no tensor-parallel plan for the layers of GPT2LMHeadModel"):
        plans.check_plan("T", gpt2, checkpoint.skeleton(gpt2, False), 2)


def test_every_process_needs_a_gpu_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tensor_parallel_options, "pick_device", torch.device)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(UserError, match="2 processes on this machine, where 1 GPU can be seen"):
        tensor_parallel_options.check_devices(2, "cuda")
    with pytest.raises(UserError, match=r"--device cuda:0: .* takes a GPU of its own; give cuda"):
        tensor_parallel_options.check_devices(2, "cuda:0")
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("cuda"))
    with pytest.raises(UserError, match="wanted cpu, but transformers' plans take any cuda"):
        tensor_parallel_options.check_devices(2, "cpu")


def test_the_command_starts_its_processes_with_everything_spelt_out(
    tiny_rows_dir: Path, tiny_target_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[tuple[int, list[str]]] = []
    monkeypatch.setattr(workers, "relaunch", lambda count, words: started.append((count, words)))
    monkeypatch.setattr(workers, "summary_of", lambda out: {"complete": True})
    assert _start(tiny_rows_dir, tiny_target_dir, tmp_path / "out", tensor_parallel=2)["complete"]
    ((count, words),) = started
    assert count == 2
    assert words[words.index("--tensor-parallel") + 1] == "2"
    assert {"--worker", "--threads", "--device", "--dtype"} <= set(words)


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
def test_a_killed_process_ends_the_command_and_the_next_run_has_the_bytes_of_an_uninterrupted_one(
    rank: int, made: SimpleNamespace, tiny_rows_dir: Path, targets: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    words = [str(tiny_rows_dir), "--target", str(targets / "tied"), "--out", str(out), "--codec", "fp32"]
    words += ["--batch-tokens", "128", "--shard-tokens", "128", "--dtype", "fp32", "--device", "cpu"]
    words += ["--threads", "1", "--tensor-parallel", "2"]
    command = [sys.executable, "-m", "eagle_cli.main", "extract", *words]
    parent = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    worker = worker_of(parent.pid, f"\0RANK={rank}\0".encode(), where="environ")
    while not (out / "shard-00001.safetensors").exists():
        assert parent.poll() is None, parent.stderr.read() if parent.stderr else ""
        time.sleep(0.01)
    os.kill(worker, signal.SIGKILL)
    _, errors = parent.communicate(timeout=300)
    assert parent.returncode == 2
    assert errors.splitlines()[-1].startswith(f"error: process {rank} of 2 was ended by SIGKILL; memory may")
    assert "Traceback" not in errors
    assert not (out / "shards.json").exists()
    subprocess.run(command, check=True, capture_output=True, timeout=300)
    left = bytes_of(out)
    whole = bytes_of(made.two / "tied")
    assert {name: left[name] for name in whole} == whole
