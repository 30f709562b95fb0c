"""How long this machine takes: the target for 1 to 64 tokens, the head for its rows, one output map."""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from typing import Any

import torch

from eagle_train.decoding.drafters import HeadDrafter
from eagle_train.decoding.law import MOST_AT_ONCE, logits_of_rows
from eagle_train.decoding.loop import Settings, generate
from eagle_train.decoding.reader import Rows, TargetReader
from eagle_train.decoding.sampling import Sampling, SeededChance
from eagle_train.decoding.shapes import Chain
from eagle_train.decoding.trees import Tree
from eagle_train.heads.disk import Head
from eagle_train.progress import Progress
from eagle_train.targets.capture import Captured
from eagle_train.targets.load import Target

SIZES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)  # tokens of one verification
OUTPUTS = tuple(size for size in SIZES if size <= MOST_AT_ONCE)
ROWS = (1, 2, 4, 8, 16)  # rows of one drafting step
PASSES = 6  # of which the first is the warm-up


@dataclass(frozen=True)
class Machine:
    """Seconds, the least of several measurements taken in turn: whatever else a machine does only adds."""

    verify: tuple[float, ...]  # the target's forward, for each of SIZES, without the output map
    draft: tuple[float, ...]  # for each of ROWS, one more level of a draft
    observe: float  # the head reading one round's rows, and its first guess
    output: tuple[float, ...]  # the target's output map, for each of OUTPUTS rows
    overhead: float  # what else a round costs, by the difference from whole rounds
    gpu: bool = False

    def verification(self, tokens: int) -> float:
        """Seconds of a target forward over so many tokens."""
        return _between(SIZES, self.verify, tokens)

    def plain_token(self) -> float:
        """Seconds of a token of plain decoding."""
        return self.verification(1) + self.output[0]

    def round(self, tokens: int, levels: Sequence[int], walked: float) -> float:
        """Seconds of a round: so many nodes, the rows of each further drafting step, nodes walked to.

        The output map runs on all nodes of a small tree at once, else on one after the other that the walk
        comes to (decoding/law.py; a GPU runs all at once whatever their number).
        """
        drafting = self.observe + sum(_between(ROWS, self.draft, rows) for rows in levels)
        at_once = tokens <= MOST_AT_ONCE or self.gpu
        outputs = _between(OUTPUTS, self.output, tokens) if at_once else walked * self.output[0]
        return self.verification(tokens) + drafting + outputs + self.overhead

    @property
    def figures(self) -> dict[str, Any]:
        """For reports, in milliseconds."""
        return {
            "verify_ms": {str(n): round(1e3 * s, 2) for n, s in zip(SIZES, self.verify, strict=True)},
            "draft_ms": {str(n): round(1e3 * s, 2) for n, s in zip(ROWS, self.draft, strict=True)},
            "observe_ms": round(1e3 * self.observe, 2),
            "output_ms": {str(n): round(1e3 * s, 2) for n, s in zip(OUTPUTS, self.output, strict=True)},
            "overhead_ms": round(1e3 * self.overhead, 2),
        }


def _between(sizes: Sequence[int], seconds: Sequence[float], wanted: int) -> float:
    """Interpolate linearly; beyond the largest size go on with the last slope."""
    at = min(max(bisect_left(sizes, wanted), 1), len(sizes) - 1)
    low, high = sizes[at - 1], sizes[at]
    return seconds[at - 1] + (seconds[at] - seconds[at - 1]) * (wanted - low) / (high - low)


@torch.inference_mode()
def measure(head: Head, target: Target, prompt: list[int], bar: Progress | None = None) -> Machine:
    """Measure with `prompt` as the text in the caches; `bar` moves by one for each of PASSES."""
    drafter = HeadDrafter(head, target, Chain(1))
    with TargetReader(target, drafter.layer_ids) as reader:
        seen = reader.read(prompt)
        drafter.begin(SeededChance(0))
        text = [*prompt, prompt[-1]]
        drafter.observe(reader.rows(0, text, seen))
        end = Captured(None if seen.aux is None else seen.aux[-2:], seen.last[-2:])
        last_two = reader.rows(len(prompt) - 2, text[-3:], end)
        jobs: dict[Any, Callable[[], object]] = {}
        for size in SIZES:
            tree = Tree(tuple(prompt[-1:] * size), tuple(range(-1, size - 1)))
            jobs["verify", size] = partial(_read_and_forget, reader, tree)
        for size in ROWS:
            jobs["draft", size] = partial(drafter.draft_level, size)
        jobs["observe"] = partial(_observe_again, drafter, last_two)
        for size in OUTPUTS:
            jobs["output", size] = partial(
                logits_of_rows, target, seen.last[-1:].expand(size, -1).contiguous()
            )
        taken = _least(jobs, target, bar)
    overhead = _whole_round(head, target, prompt) - (
        taken["verify", 2] + taken["observe"] + taken["output", 2]
    )
    return Machine(
        _rising(taken["verify", size] for size in SIZES),
        _rising(taken["draft", size] for size in ROWS),
        taken["observe"],
        tuple(taken["output", size] for size in OUTPUTS),
        max(0.0, overhead),
        target.device.type == "cuda",
    )


def _observe_again(drafter: HeadDrafter, rows: Rows) -> None:
    """What a round with one accepted guess asks of the head before any further drafting step."""
    drafter.cache.length -= len(rows.last)
    drafter.observe(rows)
    drafter.propose()


def _read_and_forget(reader: TargetReader, tree: Tree) -> None:
    start = reader.cache.length
    reader.read_tree(tree)
    reader.cache.keep(start, [])


def _least(jobs: dict[Any, Callable[[], object]], target: Target, bar: Progress | None) -> dict[Any, float]:
    """Run all jobs in turn, several times, so that whatever else the machine does hits them alike."""
    taken: dict[Any, list[float]] = {name: [] for name in jobs}
    for repeat in range(PASSES):
        for name, job in jobs.items():
            started = _now(target)
            job()
            if repeat:
                taken[name].append(_now(target) - started)
        if bar is not None:
            bar.advance(1, "measuring times")
    return {name: min(seconds) for name, seconds in taken.items()}


def _rising(seconds: Iterable[float]) -> tuple[float, ...]:
    """Take each time as no longer than that of more tokens: what is above it is noise."""
    return tuple(accumulate(reversed(list(seconds)), min))[::-1]


def _now(target: Target) -> float:
    if target.device.type == "cuda":
        torch.cuda.synchronize(target.device)
    return time.perf_counter()


def _whole_round(head: Head, target: Target, prompt: list[int]) -> float:
    """Seconds of a round of the shipped loop with one guess."""
    drafter = HeadDrafter(head, target, Chain(1), Sampling())
    settings = Settings(max_new_tokens=8, eos_ids=())
    runs = [generate(target, drafter, prompt, settings) for _ in range(4)]
    return min(made.decode_seconds / max(1, len(made.accepted)) for made in runs)
