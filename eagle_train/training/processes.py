"""This process among the others, through accelerate: device, gradient sums, small agreements."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from eagle_train.distributed import world_size
from eagle_train.errors import UserError
from eagle_train.targets.checkpoint import computes_in_bf16

_PARTITIONERS = ("DEEPSPEED", "FSDP", "MEGATRON_LM", "PARALLELISM_CONFIG")  # as accelerate launch names them


@dataclass(frozen=True)
class Processes:
    """All processes of one run. Use through `start_processes`."""

    accelerator: Any
    rank: int
    world: int
    device: torch.device

    @property
    def is_main(self) -> bool:
        """True on the one process that writes and prints."""
        return self.rank == 0

    def wrap(self, step: nn.Module) -> nn.Module:
        """Return the step with gradients averaged over processes after each synchronised backward."""
        return self.accelerator.prepare_model(step)

    @contextlib.contextmanager
    def gradients(self, step: nn.Module, synchronise: bool) -> Iterator[None]:
        """Keep gradients to this process unless `synchronise`, around one forward and backward."""
        with contextlib.nullcontext() if synchronise else self.accelerator.no_sync(step):
            yield

    def sum(self, values: Tensor) -> Tensor:
        """Return the element-wise sum of `values` over all processes."""
        return self.accelerator.reduce(values, "sum") if self.world > 1 else values

    def agree(self, seconds: float, stop: bool) -> tuple[float, bool]:
        """Return the main process's clock, and True where any process was asked to stop."""
        if self.world == 1:
            return seconds, stop
        mine = torch.tensor([seconds if self.is_main else 0.0, float(stop)], dtype=torch.float64)
        if self.device.type == "mps":
            mine = mine.float()
        total = self.sum(mine.to(self.device)).tolist()
        return total[0], total[1] > 0

    def wait(self) -> None:
        """Return once all processes are here."""
        self.accelerator.wait_for_everyone()


def join_processes() -> Processes:
    """Join the processes that torchrun or accelerate started, if any.

    Raises UserError unless accelerate and torch see as many as were launched: some launchers silently leave
    every process alone, which would train each on a part of the data without ever averaging. Raises it too
    where accelerate's own configuration would partition weights, which leaves gradients unaveraged here.
    """
    from accelerate import Accelerator

    for name in _PARTITIONERS:
        if os.environ.get(f"ACCELERATE_USE_{name}", "").lower() == "true":
            raise UserError(
                f"accelerate: its configuration asks for {name}, not used here; launch with torchrun, "
                "or with distributed_type MULTI_GPU; eagle train --deepspeed zero2|zero3 partitions"
            )
    # precision and compilation are the recipe's, whatever accelerate is configured to
    accelerator = Accelerator(
        cpu=not torch.accelerator.is_available(), mixed_precision="no", dynamo_backend="no"
    )
    joined = torch.distributed.is_available() and torch.distributed.is_initialized()
    seen = {
        "accelerate": accelerator.num_processes,
        "torch": torch.distributed.get_world_size() if joined else 1,
    }
    for name, number in seen.items():
        if number != world_size():
            raise UserError(
                f"processes: {world_size()} were launched, {name} sees {number}; start them with eagle train "
                "--processes N or with torchrun"
            )
    return Processes(accelerator, accelerator.process_index, accelerator.num_processes, accelerator.device)


def leave_processes() -> None:
    """Part from the others in good order. After an error simply exit: the others may be waiting."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def pick_precision(asked: str, device: torch.device) -> torch.dtype:
    """Return the dtype of matrix products: as asked, or bf16 where the device computes in it natively."""
    if asked == "auto":
        asked = "bf16" if computes_in_bf16(device) else "fp32"
    return torch.bfloat16 if asked == "bf16" else torch.float32
