"""One round of speculative decoding beside the target's forward on the same number of tokens, in one run.

    python scripts/bench_round.py HEAD [TARGET] [--draft chain] [--draft dynamic] [--dtype fp32]
                                  [--num-questions 4] [--max-new-tokens 48] [--json]

The shipped loop decodes greedily. After each round the target reads as many tokens as the round's tree had,
in a chain, without any mask of ours, behind the same text, and runs its output map on as many rows as the
round did: that is its own forward. A round is all from one draft to the next; the time in the head's own
forwards is taken off it, and the rest is divided by the forward's time, round by round. Prints the medians,
of processor time on one core; the goal is 1.25 at most. TARGET is the small one by default.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from statistics import median
from typing import Any

import torch
from decoding_case import open_case, options

from eagle_train.decoding.drafters import HeadDrafter
from eagle_train.decoding.law import MOST_AT_ONCE, logits_of_rows
from eagle_train.decoding.loop import Settings, generate
from eagle_train.decoding.reader import Rows, TargetReader
from eagle_train.decoding.sampling import Chance
from eagle_train.decoding.shapes import Chain, Dynamic, Shape
from eagle_train.decoding.trees import Tree
from eagle_train.evaluation.heads import open_head
from eagle_train.evaluation.report import draft_name
from eagle_train.heads.disk import EagleHead
from eagle_train.targets.load import Target

GOAL = 1.25
SHAPES: dict[str, Shape] = {"chain": Chain(3), "dynamic": Dynamic(total_tokens=26, top_k=8, depth=3)}


@dataclass
class Round:
    """Seconds of processor time."""

    tokens: int
    whole: float
    head: float
    forward: float

    @property
    def ratio(self) -> float:
        """What the loop takes, the head's forwards left out, over the target's own forward."""
        return (self.whole - self.head) / self.forward


@dataclass
class Timed:
    """Passes everything on to `drafter`, and times each round and, after it, the target's own forward."""

    drafter: HeadDrafter
    target: Target
    rounds: list[Round] = field(default_factory=list)
    _in_head: float = 0.0

    def __post_init__(self) -> None:
        self.layer_ids = self.drafter.layer_ids
        head: Any = self.drafter.head
        for name in ("start", "forward", "logits"):
            setattr(head, name, self._in_the_head(getattr(head, name)))

    def _in_the_head(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*given: Any, **more: Any) -> Any:
            began = time.process_time()
            found = call(*given, **more)
            self._in_head += time.process_time() - began
            return found

        return timed

    def begin(self, chance: Chance) -> None:
        """Begin a text, and a second reading of it for the target's own forwards."""
        self._tree: Tree | None = None
        self._beside = TargetReader(self.target, ())
        self.drafter.begin(chance)

    def propose(self) -> Tree:
        """Draft; a round begins here."""
        self._began, self._in_head = time.process_time(), 0.0
        self._tree = self.drafter.propose()
        return self._tree

    def observe(self, rows: Rows) -> None:
        """Take verified rows in; a round ends here."""
        self.drafter.observe(rows)
        if self._tree is not None:
            whole, head = time.process_time() - self._began, self._in_head
            forward = self._own_forward(len(self._tree), len(rows.last))
            self.rounds.append(Round(len(self._tree), whole, head, forward))
        self._beside.read(rows.tokens[:-1].tolist())

    def _own_forward(self, tokens: int, walked: int) -> float:
        """Return the seconds of a forward over so many tokens, of which the round walked to some."""
        cache, device = self._beside.cache, self.target.device
        ids, before = torch.zeros(1, tokens, dtype=torch.int64, device=device), cache.length
        began = time.process_time()
        last = self.target.run_body(ids, cache=cache)[0]
        if tokens <= MOST_AT_ONCE:
            logits_of_rows(self.target, last)
        else:
            for state in last[:walked]:
                self.target.logits(state)
        seconds = time.process_time() - began
        cache.keep(before, [])
        return seconds


def measure(
    head: EagleHead, target: Target, shape: Shape, prompts: list[list[int]], settings: Settings
) -> dict[str, Any]:
    """Decode the prompts, the first once more before them; return medians over all rounds."""
    timed = Timed(HeadDrafter(head, target, shape, settings.sampling), target)
    generate(target, timed, prompts[0], settings)
    timed.rounds.clear()
    for prompt in prompts:
        generate(target, timed, prompt, settings)
    rounds = timed.rounds
    return {
        "draft": draft_name(shape.figures),
        "rounds": len(rounds),
        "tokens_of_a_forward": median(one.tokens for one in rounds),
        "round_ms": 1e3 * median(one.whole for one in rounds),
        "head_ms": 1e3 * median(one.head for one in rounds),
        "forward_ms": 1e3 * median(one.forward for one in rounds),
        "ratio": median(one.ratio for one in rounds),
    }


def main() -> None:
    parser = options(__doc__, num_questions=4, max_new_tokens=48)
    parser.add_argument("--draft", action="append", choices=list(SHAPES), default=[])
    given = parser.parse_args()
    target, prompts = open_case(given)
    settings, found = Settings(max_new_tokens=given.max_new_tokens, eos_ids=()), []
    for name in given.draft or SHAPES:
        head = open_head(given.head, target)
        assert not hasattr(head, "medusa"), "an EAGLE head is wanted"
        found.append(measure(head, target, SHAPES[name], prompts, settings))  # type: ignore[arg-type]
    if given.json:
        print(json.dumps({"goal": GOAL, "drafts": found}))
        return
    for one in found:
        print(
            f"{one['draft']}: {one['rounds']} rounds, a round {one['round_ms']:.1f} ms, of it the head's "
            f"forwards {one['head_ms']:.1f}, the target's own forward {one['forward_ms']:.1f}; "
            f"ratio {one['ratio']:.3f} (goal {GOAL})"
        )


if __name__ == "__main__":
    main()
