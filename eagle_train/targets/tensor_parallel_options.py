"""What ``--tensor-parallel`` asks of the machine, and which options do not go with it."""

from __future__ import annotations

import torch

from eagle_train import distributed
from eagle_train.errors import UserError
from eagle_train.progress import counted
from eagle_train.targets.load import pick_device


def refuse_others(size: int, processes: int | None, device_map: str | None) -> None:
    """Raise UserError for what does not go with the model in `size` parts."""
    if size < 2:
        raise UserError(f"--tensor-parallel {size}: wanted 2 or more processes, or leave it out")
    if processes is not None and processes > 1:
        raise UserError(
            f"--tensor-parallel {size}: its processes are one worker, wanted no --processes {processes}; "
            "start the command on other GPUs too to share the work"
        )
    if device_map is not None:
        raise UserError(
            f"--tensor-parallel {size}: with --device-map {device_map} one process holds the whole model; "
            "leave one of the two out"
        )
    if distributed.launched() and distributed.world_size() != size:
        raise UserError(
            f"--tensor-parallel {size}: torchrun started {distributed.world_size()} processes, wanted {size}"
        )


def check_devices(size: int, device: str | torch.device | None) -> torch.device:
    """Return this process's device among `size`; raise UserError where they cannot have theirs."""
    place = pick_device(device)
    if ":" in str(device):
        raise UserError(
            f"--device {device}: with --tensor-parallel {size} every process takes a GPU of its own; give "
            f"{place.type}, and choose GPUs by CUDA_VISIBLE_DEVICES"
        )
    if place.type == "cpu" and torch.accelerator.is_available():
        kind = torch.accelerator.current_accelerator()
        raise UserError(
            f"--tensor-parallel {size}: wanted cpu, but transformers' plans take any {kind} that they see; "
            "hide it (CUDA_VISIBLE_DEVICES= for a GPU)"
        )
    here = distributed.local_world_size() if distributed.launched() else size
    if place.type == "cuda" and here > torch.cuda.device_count():
        raise UserError(
            f"--tensor-parallel {size}: {here} processes on this machine, where "
            f"{counted(torch.cuda.device_count(), 'GPU')} can be seen; every process takes one of its own"
        )
    return place
