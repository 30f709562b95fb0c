"""Bytes of quantised weights, held and planned; a config that says it is quantised."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import torch

from eagle_train.targets.checkpoint import load_config, skeleton
from eagle_train.targets.stored import weights_bytes


def is_quantised(weight: torch.Tensor) -> bool:
    return type(weight).__module__.startswith("torchao")


def held(model: torch.nn.Module) -> int:
    """Return the bytes of a model's parameters, the parts of quantised ones one by one."""
    size = 0
    for weight in model.parameters():
        parts = [getattr(weight, name) for name in getattr(weight, "tensor_data_names", ())]
        parts += [getattr(weight, name, None) for name in getattr(weight, "optional_tensor_data_names", ())]
        size += sum(part.numel() * part.element_size() for part in parts or [weight] if part is not None)
    return size


def planned(folder: str | Path) -> int:
    config = load_config(str(folder), False)
    return weights_bytes(str(folder), config, skeleton(config, False), torch.float32)


def marked(source: Path, folder: Path, quantisation: dict | str) -> Path:
    """Copy a target and let its config say that it is quantised."""
    shutil.copytree(source, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": quantisation}))
    return folder
