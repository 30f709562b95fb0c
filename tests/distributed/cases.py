"""Runs that one process and two must take alike; as a program, all of them in the processes launched."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path

import torch

from eagle_train.recipe_files import load_recipe
from eagle_train.shards.reader import Shards
from eagle_train.training.loop import train
from eagle_train.training.processes import leave_processes

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
CASES = {
    "three rows a step": ["data.rows_per_step=3"],
    "one row a step": ["data.rows_per_step=1"],
    "eagle1, one row a step": [*EAGLE1, "data.rows_per_step=1"],
    "one row is NaN": ["data.rows_per_step=4", "run.steps=5"],
}
POISONED = 5  # the row, which is met in these steps once


def run(name: str, shards: str, shards_eagle1: str, out: str) -> None:
    """Train one case into out/NAME."""
    read = Shards.read
    if name == "one row is NaN":
        Shards.read = _reading_nan(read)  # type: ignore[method-assign]
    try:
        recipe = load_recipe("eagle3-tiny", [*SETTINGS, *CASES[name]])
        train(shards_eagle1 if "eagle1" in name else shards, recipe, Path(out) / name, show=False)
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
    torch.set_num_threads(1)
    for case in CASES:
        run(case, *sys.argv[1:])
    leave_processes()
