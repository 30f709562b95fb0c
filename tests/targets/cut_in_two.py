"""Extractions by two processes that hold one model together, all in one launch; the last of them fails."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from eagle_train.errors import UserError
from eagle_train.targets import tensor_parallel, workers
from eagle_train.targets.extract import extract
from eagle_train.targets.load import Target

SETTINGS: dict[str, Any] = {"batch_tokens": 128, "shard_tokens": 128, "dtype": "fp32", "device": "cpu"}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "tied": ("tied", {"codec": "fp32"}),
    "untied": ("untied", {"codec": "fp32", "features": "all"}),
    "top labels": ("tied", {"codec": "fp32", "label_top_k": 4}),
    "again": ("tied", {"codec": "fp32"}),
}


def _all_cases(
    rows: str, targets: str, out: Path, group: tensor_parallel.Group, **given: Any
) -> dict[str, Any]:
    for name, (target, settings) in CASES.items():
        extract(rows, f"{targets}/{target}", out / name, group=group, threads=1, **SETTINGS, **settings)
        if name == "again":
            (out / name / "shard-00003.safetensors").unlink()
            extract(rows, f"{targets}/{target}", out / name, group=group, threads=1, **SETTINGS, **settings)
    try:
        extract(rows, f"{targets}/miscut", out / "miscut", group=group, **SETTINGS)
    except UserError as error:
        (out / "miscut.txt").write_text(str(error))
    return extract(rows, f"{targets}/unfit", out / "unfit", group=group, **SETTINGS)


def _counted(target: Target, out: Path) -> None:
    weights = [getattr(weight, "_local_tensor", weight) for weight in target.model.parameters()]
    held = sum(weight.numel() * weight.element_size() for weight in weights)
    (out / f"held-{Path(target.name).name}.json").write_text(json.dumps(held))


if __name__ == "__main__":
    rows, targets, out = sys.argv[1:]
    load = tensor_parallel._load

    def loaded(group: tensor_parallel.Group, *settings: Any, **named: Any) -> Target:
        target = load(group, *settings, **named)
        if target.name.endswith("miscut"):  # as if its sum over the processes were not one
            product = target.layers[4].mlp.down_proj
            own = product.forward
            product.forward = lambda stream: own(stream) / 2
        elif not group.leads:
            _counted(target, Path(out))
        return target

    tensor_parallel._load = loaded
    workers.extract = _all_cases  # type: ignore[assignment]
    workers.start_workers(rows, targets, Path(out), tensor_parallel=2, device="cpu", show=False)
