"""Runs that one process and two must take alike; as a program, all of them in the processes launched."""

from __future__ import annotations

import dataclasses
import sys
from importlib.util import find_spec
from pathlib import Path

import torch

from eagle_train.distributed import world_size
from eagle_train.recipe_files import load_recipe
from eagle_train.shards.reader import Shards
from eagle_train.training.loop import train
from eagle_train.training.processes import leave_processes
from eagle_train.training.source import LiveTarget

# A large epsilon makes AdamW smooth in the gradient, so weights can be compared closely; clipping would hide
# a wrong scale of the gradient.
SETTINGS = [
    "optim.eps=1.0",
    "optim.lr=0.3",
    "optim.clip_norm=0",
    "schedule.warmup_steps=0",
    "data.micro_tokens=250",
    "run.steps=6",
    "run.eval_every=3",
    "data.held_out=3",
]
EAGLE1 = ["head.kind=eagle1", "head.draft_vocab_size=null", "loss.noise=0.2"]
LAYERS = ["head.num_hidden_layers=2", "head.layer_ids=[2, 5]", "schedule.shape=constant"]
CASES = {
    "three rows a step": ["data.rows_per_step=3"],
    "one row a step": ["data.rows_per_step=1"],
    "eagle1, one row a step": [*EAGLE1, "data.rows_per_step=1"],
    "one row is NaN": ["data.rows_per_step=4", "run.steps=5"],
    "zero2, three rows a step": ["data.rows_per_step=3"],
    "zero3, one row a step": ["data.rows_per_step=1"],
    "zero3, one row is NaN": ["data.rows_per_step=4", "run.steps=5"],
    "online, three rows a step": ["data.rows_per_step=3"],
    "passing, three rows a step": ["data.rows_per_step=3"],
    "zero2, bf16": ["data.rows_per_step=3", "run.precision=bf16"],
    "begun by one, going on": [*LAYERS, "data.rows_per_step=3"],
    "zero2, going on": [*LAYERS, "data.rows_per_step=3"],
    "zero3, going on": [*LAYERS, "data.rows_per_step=1"],
}
LIVE = {
    "online": lambda target: LiveTarget(target, "fp32"),
    "passing": lambda target: LiveTarget(target, "fp32", max_disk=700_000, codec="fp32"),
}
POISONED = 5  # the row, which is met in these steps once


@dataclasses.dataclass(frozen=True)
class Places:
    """Where a case finds its data, and makes its folder."""

    shards: str
    shards_eagle1: str
    rows: str
    target: str
    out: str


def run(name: str, places: Places, until: int | None = None) -> None:
    """Train one case into out/NAME, or go on with it; a case named after a stage uses it, but in one process.

    It ends after `until` steps, where given.
    """
    read = Shards.read
    stage = name.split(",")[0] if name.startswith("zero") and world_size() > 1 else None
    if "NaN" in name:
        Shards.read = _reading_nan(read)  # type: ignore[method-assign]
    try:
        steps = [] if until is None else [f"run.steps={until}"]
        recipe = load_recipe("eagle3-tiny", [*SETTINGS, *CASES[name], *steps])
        source = places.shards_eagle1 if "eagle1" in name else places.shards
        live = LIVE.get(name.split(",")[0], lambda target: None)(places.target)
        source = places.rows if live else source
        out = Path(places.out) / name
        begun = (out / "recipe.yaml").is_file()
        train(source, recipe, out, live=live, resume=begun, deepspeed=stage, show=False)
    finally:
        Shards.read = read  # type: ignore[method-assign]


def _reading_nan(read):
    def reading(self, row):
        found = read(self, row)
        if row == POISONED:
            found = dataclasses.replace(found, aux=torch.full_like(found.aux, float("nan")))
        return found

    return reading


if __name__ == "__main__":
    with_deepspeed = find_spec("deepspeed") is not None
    for case in CASES:
        if with_deepspeed or not case.startswith("zero"):
            places = Places(*sys.argv[1:])
            if case in ("zero2, going on", "zero3, going on"):
                run(case, places, until=3)
            run(case, places)
    leave_processes()
