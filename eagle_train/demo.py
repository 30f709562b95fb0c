"""The whole chain on the built-in small case: conversations to a proven head, on a laptop.

Every stage is one documented call, the same that its command makes, and leaves its record under `out`.
A repeated demo takes rows, shards and the run as they are, and decodes anew.
"""

from __future__ import annotations

import importlib.resources
import resource
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from eagle_train.data.prepare import prepare
from eagle_train.decoding.shapes import Chain, Dynamic
from eagle_train.evaluation.evaluate import evaluate
from eagle_train.export.export import export
from eagle_train.io.paths import make_folder
from eagle_train.io.text import write_json
from eagle_train.recipe_files import load_recipe
from eagle_train.targets.builtin import small_target
from eagle_train.targets.checkpoint import computes_in_bf16
from eagle_train.targets.load import default_device
from eagle_train.targets.workers import start_workers
from eagle_train.training.loop import train
from eagle_train.training.metrics import read_metrics

RECIPE = "eagle3-smollm2"
NUM_QUESTIONS = 20
NEW_TOKENS = 64
CHAIN = Chain(3)
TREE = Dynamic(total_tokens=26, top_k=8, depth=3)


def built_in_conversations() -> Path:
    """Return the shipped conversations: our prompts with the small target's own greedy answers."""
    return Path(str(importlib.resources.files("eagle_train.data.builtin") / "conversations.jsonl.gz"))


def demo(out: str | Path) -> dict[str, Any]:
    """Run prepare, extract, train, eval and export into the folder `out`; return the figures.

    Keys: ``untrained_tau`` and ``predicted_tau`` (chain of 3 on held-out conversations, without decoding),
    ``evaluation`` (as `evaluate` returns it: both drafts beside plain decoding, float32), ``seconds`` by
    stage, ``peak_memory_gib`` of the largest process, ``folders``. Raises UserError as the stages do.
    """
    folder = make_folder(out)
    seconds: dict[str, float] = {}
    with _stage(seconds, "fetch the target"):
        target = str(small_target())
    with _stage(seconds, "prepare"):
        prepare([str(built_in_conversations())], target, folder / "rows")
    with _stage(seconds, "extract"):
        dtype = "bf16" if computes_in_bf16(default_device()) else "fp32"
        start_workers(folder / "rows", target, folder / "shards", features="eagle3", dtype=dtype)
    with _stage(seconds, "train"):
        trained = train(folder / "shards", load_recipe(RECIPE), folder / "run")
    with _stage(seconds, "eval"):
        evaluation = evaluate(
            folder / "run",
            target,
            drafts=[CHAIN, TREE],
            num_questions=NUM_QUESTIONS,
            max_turns=1,
            max_new_tokens=NEW_TOKENS,
            dtype="fp32",
        )
    with _stage(seconds, "export"):
        exported = export(folder / "run", folder / "head", engine="vllm")
    report = {
        "untrained_tau": _untrained_tau(folder / "run"),
        "predicted_tau": trained["best_tau"],
        "evaluation": evaluation,
        "seconds": seconds,
        "peak_memory_gib": _peak_memory_gib(),
        "target": target,
        "folders": {name: str(folder / name) for name in ("rows", "shards", "run", "head")},
        "head": exported,
    }
    write_json(folder / "demo.json", report)
    return report


def _untrained_tau(run: Path) -> float:
    """Return the acceptance length that the trainer predicted before its first step."""
    return float(read_metrics(run)[0]["tau"])


def _peak_memory_gib() -> float:
    """Return the largest resident size of this process or any worker it waited for."""
    unit = 1 if sys.platform == "darwin" else 1024  # bytes there, KiB elsewhere
    peak = max(resource.getrusage(who).ru_maxrss for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return peak * unit / 2**30


@contextmanager
def _stage(seconds: dict[str, float], name: str) -> Iterator[None]:
    """Announce a stage and note how long it took."""
    print(f"\n== {name}", file=sys.stderr, flush=True)
    started = time.monotonic()
    yield
    seconds[name] = round(time.monotonic() - started, 1)
