"""What eagle plan says beside what extraction and training then take, in one run.

    python scripts/bench_plan.py ROWS TARGET [--recipe eagle3-smollm2] [--set run.steps=60]
                                 [--codec bf16] [--seconds 10] [--processes 1] [--json]

Plans, extracts the rows with as many workers as the plan assumed, trains by the recipe without evaluations,
and prints planned / real for bytes and times. Start-up (imports, loading weights) is no part of
either, save that several workers are timed with theirs.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from eagle_train.config import Recipe
from eagle_train.estimate import estimate
from eagle_train.recipe_files import load_recipe
from eagle_train.targets.workers import start_workers
from eagle_train.training.loop import train


def compare(
    rows: str, target: str, recipe: Recipe, codec: str, seconds: float, processes: int
) -> dict[str, Any]:
    """Return planned and real bytes and seconds."""
    kind = recipe.head.kind
    planned = estimate(rows, target, recipe, codec=codec, seconds=seconds, processes=processes)
    with tempfile.TemporaryDirectory(prefix="eagle-bench-plan-") as temporary:
        shards, run = Path(temporary) / "shards", Path(temporary) / "run"
        begun = time.monotonic()
        made = start_workers(rows, target, shards, processes=processes, features=kind, codec=codec)
        seconds = made.get("seconds", time.monotonic() - begun)  # of several workers with their start
        size = sum(file.stat().st_size for file in shards.iterdir())
        trained = train(shards, recipe, run)
    return {
        "bytes": {"planned": planned["bytes"][codec], "real": size},
        "extract_seconds": {"planned": 3600 * planned["hours"]["extract"], "real": seconds},
        "train_seconds": {"planned": 3600 * planned["hours"]["train"], "real": trained["seconds"]},
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("rows")
    parser.add_argument("target")
    parser.add_argument("--recipe", default="eagle3-smollm2")
    parser.add_argument("--set", dest="settings", action="append", default=[])
    parser.add_argument("--codec", default="bf16")
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    recipe = load_recipe(given.recipe, given.settings)
    recipe = replace(recipe, run=replace(recipe.run, eval_every=1 << 40))
    found = compare(given.rows, given.target, recipe, given.codec, given.seconds, given.processes)
    if given.json:
        print(json.dumps(found))
        return
    for name, figures in found.items():
        planned, real = figures["planned"], figures["real"]
        print(f"{name}: planned {planned:,.1f}, real {real:,.1f}: {planned / real:.3f}")


if __name__ == "__main__":
    main()
