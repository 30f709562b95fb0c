"""How a process joins the others: all of them or none, in the precision that the recipe says."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from torch import nn

from eagle_train import launch
from eagle_train.errors import UserError
from eagle_train.training.processes import Processes, join_processes, pick_precision


def test_processes_that_accelerate_does_not_see_are_refused(monkeypatch):
    assert isinstance(join_processes(), Processes)
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(UserError, match="2 were launched, accelerate sees 1"):
        join_processes()
    monkeypatch.setattr(Accelerator, "num_processes", 2)
    with pytest.raises(UserError, match="2 were launched, torch sees 1"):
        join_processes()


def test_precision_is_as_asked_or_what_the_device_computes_in(monkeypatch):
    cpu = torch.device("cpu")
    assert pick_precision("fp32", cpu) == torch.float32
    assert pick_precision("bf16", cpu) == torch.bfloat16
    for native, dtype in ((True, torch.bfloat16), (False, torch.float32)):
        monkeypatch.setattr("eagle_train.training.processes.computes_in_bf16", lambda _, n=native: n)
        assert pick_precision("auto", cpu) == dtype


@pytest.fixture
def unjoined(monkeypatch):
    """accelerate as at the start of a process: it reads the variables of its launcher but once."""
    AcceleratorState._reset_state(reset_partial_state=True)
    yield monkeypatch
    AcceleratorState._reset_state(reset_partial_state=True)


@pytest.mark.parametrize(
    ("name", "value"),
    [("MIXED_PRECISION", "bf16"), ("DYNAMO_BACKEND", "INDUCTOR")],
)
def test_what_accelerate_is_configured_to_does_not_change_the_arithmetic(name, value, unjoined):
    unjoined.setenv(f"ACCELERATE_{name}", value)
    step = nn.Linear(16, 16)
    forward, x = step.forward, torch.randn(3, 16)
    wrapped = join_processes().wrap(step)
    assert wrapped is step
    assert step.forward == forward
    assert torch.equal(wrapped(x), nn.functional.linear(x, step.weight, step.bias))


@pytest.mark.parametrize("name", ["DEEPSPEED", "FSDP", "MEGATRON_LM", "PARALLELISM_CONFIG"])
def test_weights_that_accelerate_would_partition_are_refused(name, monkeypatch):
    monkeypatch.setenv(f"ACCELERATE_USE_{name}", "true")
    with pytest.raises(
        UserError, match=f"its configuration asks for {name}, .*eagle train --deepspeed zero2"
    ):
        join_processes()


@pytest.mark.parametrize(("given", "wanted"), [(None, "600"), ("5", "5")])
def test_processes_that_are_stopped_get_longer_to_save_than_torchruns_half_a_minute(
    given, wanted, monkeypatch
):
    name, seen = "TORCH_ELASTIC_SHUTDOWN_TIMEOUT", {}
    monkeypatch.delenv(name, raising=False)
    if given:
        monkeypatch.setenv(name, given)
    child = SimpleNamespace(wait=lambda: 0)
    monkeypatch.setattr(launch.subprocess, "Popen", lambda _, env: seen.update(env) or child)
    launch.relaunch(2, ["train"])
    assert seen[name] == wanted


def test_processes_that_fail_alike_are_heard_once_and_torchrun_adds_nothing(tmp_path, capfd):
    with pytest.raises(UserError, match=f"^{tmp_path}/none/rows.json: not found; "):
        launch.relaunch(2, ["inspect", str(tmp_path / "none")])
    assert capfd.readouterr().err == ""
