"""What eagle plan says beside what extraction and training then take, in one run.

    python scripts/bench_plan.py ROWS TARGET [--recipe eagle3-smollm2] [--set run.steps=60]
                                 [--codec bf16] [--seconds 10] [--processes 1] [--json]

Plans, extracts the rows with as many workers as the plan assumed, trains by the recipe, and prints planned /
real for bytes and times, from the first look at the rows to the last file: by the clock, and in processor
time of one worker (the hours that the plan gives for a free machine), with the share of a core that was had
meanwhile. Other work that comes or goes between plan and work moves the first ratio, not the second. Imports
are no part of either, save that several workers are timed with theirs.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

from eagle_train.config import Recipe
from eagle_train.estimate import estimate
from eagle_train.recipe_files import load_recipe
from eagle_train.targets.workers import start_workers
from eagle_train.training.loop import train
from eagle_train.trial import Stopwatch


def compare(
    rows: str, target: str, recipe: Recipe, codec: str, seconds: float, processes: int
) -> dict[str, Any]:
    """Return planned and real bytes and seconds."""
    kind = recipe.head.kind
    estimate(rows, target, recipe, seconds=0)  # imports what all three need
    planned = estimate(rows, target, recipe, codec=codec, seconds=seconds, processes=processes)
    with tempfile.TemporaryDirectory(prefix="eagle-bench-plan-") as temporary:
        shards, run = Path(temporary) / "shards", Path(temporary) / "run"
        with Stopwatch() as extracting:
            start_workers(rows, target, shards, processes=processes, features=kind, codec=codec)
        size = sum(file.stat().st_size for file in shards.iterdir())
        with Stopwatch() as training:
            train(shards, recipe, run)
    found = {"bytes": {"planned": planned["bytes"][codec], "real": size}}
    for stage, watch in (("extract", extracting), ("train", training)):
        share = watch.share(planned["device"])
        hours, free = planned["hours"][stage], planned["hours_if_free"][stage]
        found[f"{stage}_seconds"] = {"planned": 3600 * hours, "real": watch.wall}
        if processes == 1:
            found[f"{stage}_processor_seconds"] = {"planned": 3600 * free, "real": watch.wall * share}
            found[f"{stage}_share_of_a_core"] = {"planned": planned["share_of_a_core"][stage], "real": share}
    return found


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
    found = compare(given.rows, given.target, recipe, given.codec, given.seconds, given.processes)
    if given.json:
        print(json.dumps(found))
        return
    for name, figures in found.items():
        planned, real = figures["planned"], figures["real"]
        print(f"{name}: planned {planned:,.2f}, real {real:,.2f}: {planned / real:.3f}")


if __name__ == "__main__":
    main()
