"""Variants of a recipe under one budget, each with several seeds: acceptance lengths with their intervals.

    python scripts/ablate.py shards/ --recipe eagle3-smollm2 --out ablation/ --seeds 3 \\
        --set run.tokens=200000 \\
        "seven steps: loss.ttt_steps=7" "one step: loss.ttt_steps=1" "lk: loss.divergence=lk"

A variant is a name and settings with commas between, after what --set says for all; `shards=DIR` among them
takes other shards (answers of another source). Runs lie in OUT/NAME-SEED; typed
again, finished ones are kept. Every final head is scored by a greedy chain, predicted without decoding: on
the held-out conversations, or on all of the shards that `--on` names, or `on=DIR` in a variant, which no
variant may have trained on. Answers there should be the target's own. The intervals hold 95 % of 2,000
bootstrap samples that draw conversations and seeds anew; differences are to the first variant, on the same
conversations. Prints a Markdown table; --json for machines.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from eagle_train.config import Recipe
from eagle_train.errors import UserError
from eagle_train.recipe_files import load_recipe
from eagle_train.shards.reader import open_shards
from eagle_train.training.checkpoints import read_head
from eagle_train.training.held_out import predict_chain, rows_of
from eagle_train.training.loader import Loader
from eagle_train.training.loop import train

SAMPLES = 2000


@dataclass(frozen=True)
class Variant:
    """One way to train."""

    name: str
    settings: tuple[str, ...]
    shards: Path
    on: Path | None = None  # the shards to score on; None = what training holds out

    @classmethod
    def of(cls, text: str, shards: Path, on: Path | None = None) -> Variant:
        name, colon, rest = text.partition(":")
        if not colon:
            raise UserError(f"{text}: wanted NAME: KEY=VALUE,KEY=VALUE")
        settings, places = [], {"shards": shards, "on": on}
        for word in filter(None, (word.strip() for word in rest.split(","))):
            key, _, value = word.partition("=")
            if key in places:
                places[key] = Path(value)
            else:
                settings.append(word)
        return cls(name.strip(), tuple(settings), places["shards"] or shards, places["on"])


def score(run: Path, variant: Variant, recipe: Recipe) -> dict[str, tuple[int, int]]:
    """Return (rounds, tokens) of each conversation that a run's last head is scored on."""
    shards = open_shards(variant.on or variant.shards)
    rows_there = range(len(shards)) if variant.on else rows_of(shards, recipe, variant.shards)[1]
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    head, frozen = read_head(run / "last").to(device), shards.frozen_target().to(device, torch.float32)
    if head.config.kind == "eagle3":
        shards.read_layers(head.config.feature_layers, run.name)
    loader = Loader(shards, recipe.head.kind, recipe.run.eval_gamma, recipe.data.micro_tokens)
    rows: dict[str, list[int]] = {}
    for row in rows_there:
        rows.setdefault(shards.conversation_ids[row], []).append(row)
    found = {}
    for conversation, mine in rows.items():
        batches = (batch.to(device) for batch in loader.evaluation(mine))
        counts = predict_chain(head, frozen, batches, recipe.run.eval_gamma)
        found[conversation] = (counts.rounds, counts.tokens)
    return found


def table(scores: dict[str, list[dict[str, tuple[int, int]]]], seed: int = 0) -> list[dict[str, Any]]:
    """Return a line for each variant: tau, its interval, and the difference to the first with its own.

    `scores` holds per variant and seed what `score` gave, over the same conversations.
    """
    ids = list(next(iter(scores.values()))[0])
    for name, runs in scores.items():
        if any(set(run) != set(ids) for run in runs):
            raise UserError(f"{name}: scored on other conversations than the first variant")
    counts = {
        name: np.array([[run[one] for one in ids] for run in runs]) for name, runs in scores.items()
    }  # [seeds, conversations, 2]
    draw = np.random.default_rng(seed)
    samples: dict[str, list[float]] = {name: [] for name in counts}
    for _ in range(SAMPLES):
        chosen = draw.integers(len(ids), size=len(ids))
        for name, values in counts.items():
            seeds = draw.integers(len(values), size=len(values))
            samples[name].append(_tau(values[seeds][:, chosen]))
    first = next(iter(counts))
    lines = []
    for name, values in counts.items():
        difference = np.array(samples[name]) - np.array(samples[first])
        lines.append(
            {
                "variant": name,
                "seeds": len(values),
                "tau": _tau(values),
                "tau_interval": _interval(np.array(samples[name])),
                "taus": [_tau(one) for one in values],
                "difference": _tau(values) - _tau(counts[first]),
                "difference_interval": _interval(difference),
            }
        )
    return lines


def _tau(counts: np.ndarray) -> float:
    """Pool rounds and tokens [.., 2] over all but the last axis."""
    rounds, tokens = counts.reshape(-1, 2).sum(0)
    return float(tokens / rounds)


def _interval(samples: np.ndarray) -> list[float]:
    return [float(x) for x in np.quantile(samples, (0.025, 0.975))]


def run_all(
    variants: list[Variant], recipe: str, settings: list[str], seeds: int, out: Path, show: bool = True
) -> list[dict[str, Any]]:
    """Train what is not trained yet, score, and return the table."""
    scores: dict[str, list[dict[str, tuple[int, int]]]] = {}
    for variant in variants:
        for seed in range(seeds):
            resolved = load_recipe(recipe, [*settings, *variant.settings, f"run.seed={seed}"])
            folder = out / f"{variant.name.replace(' ', '-')}-{seed}"
            train(variant.shards, resolved, folder, show=show)
            scores.setdefault(variant.name, []).append(score(folder, variant, resolved))
    return table(scores)


def as_markdown(lines: list[dict[str, Any]]) -> str:
    """Return the table for people."""
    rows = ["| variant | seeds | tau | 95 % | against the first | 95 % |", "|---|---|---|---|---|---|"]
    for line in lines:
        low, high = line["tau_interval"]
        less, more = line["difference_interval"]
        rows.append(
            f"| {line['variant']} | {line['seeds']} | {line['tau']:.3f} | {low:.3f} to {high:.3f} "
            f"| {line['difference']:+.3f} | {less:+.3f} to {more:+.3f} |"
        )
    return "\n".join(rows)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("shards", type=Path)
    parser.add_argument("variants", nargs="+")
    parser.add_argument("--recipe", required=True)
    parser.add_argument("--set", dest="settings", action="append", default=[])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--on", type=Path, help="shards to score on")
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    try:
        variants = [Variant.of(text, given.shards, given.on) for text in given.variants]
        lines = run_all(variants, given.recipe, given.settings, given.seeds, given.out)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(json.dumps(lines) if given.json else as_markdown(lines))
    return 0


if __name__ == "__main__":
    sys.exit(main())
