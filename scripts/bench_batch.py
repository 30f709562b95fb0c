"""Decoding of 1, 4 and 8 prompts at once, plain, by a chain and by a tree, in one run on one core.

    python scripts/bench_batch.py HEAD [TARGET] [--size 1] [--size 4] [--size 8] [--num-questions 8]
                                  [--max-new-tokens 24] [--dtype fp32] [--json]

Every way answers the same prompts greedily. Prints tokens by second of processor time without the prefill,
over plain decoding's of one prompt at a time, and whether all answers are equal. TARGET is the small one by
default.
"""

from __future__ import annotations

import copy
import json
import time
from typing import Any

from decoding_case import open_case, options

from eagle_train.decoding.batch import Job, generate_together
from eagle_train.decoding.drafters import HeadDrafter
from eagle_train.decoding.loop import Settings
from eagle_train.decoding.sampling import SeededChance
from eagle_train.decoding.shapes import Chain, Dynamic, Shape
from eagle_train.evaluation.heads import open_head
from eagle_train.evaluation.report import draft_name
from eagle_train.heads.disk import Head
from eagle_train.targets.load import Target

DRAFTS: tuple[Shape | None, ...] = (None, Chain(3), Dynamic(total_tokens=26, top_k=8, depth=3))


def measure(
    head: Head, target: Target, prompts: list[list[int]], sizes: list[int], settings: Settings
) -> list[dict[str, Any]]:
    """Return for each draft and size the tokens by second, times plain decoding of one prompt at a time."""
    found: list[dict[str, Any]] = []
    for shape in DRAFTS:
        drafter = None if shape is None else HeadDrafter(head, target, shape)
        for size in sizes:
            jobs = [Job(prompt, copy.copy(drafter), SeededChance(0)) for prompt in prompts]
            began = time.process_time()
            made = generate_together(target, jobs, settings, size)
            spent, wall = time.process_time() - began, sum(m.prefill_seconds + m.decode_seconds for m in made)
            decoding = spent * sum(m.decode_seconds for m in made) / wall
            name = "plain" if shape is None else draft_name(shape.figures)
            rate = sum(len(m.ids) - 1 for m in made) / decoding
            found.append({"draft": name, "size": size, "rate": rate, "ids": [m.ids for m in made]})
    first = found[0]
    for one in found:
        one["times_plain"] = one["rate"] / first["rate"]
        one["equal"] = one.pop("ids") == first["ids"] if one is not first else True
    first.pop("ids", None)
    return found


def main() -> None:
    parser = options(__doc__, num_questions=8, max_new_tokens=24)
    parser.add_argument("--size", type=int, action="append", default=[])
    given = parser.parse_args()
    target, prompts = open_case(given)
    settings = Settings(max_new_tokens=given.max_new_tokens, eos_ids=())
    found = measure(open_head(given.head, target), target, prompts, given.size or [1, 4, 8], settings)
    if given.json:
        print(json.dumps(found))
        return
    for one in found:
        print(
            f"{one['draft']}, {one['size']} at once: {one['rate']:.1f} tokens/s, {one['times_plain']:.2f} "
            f"times plain decoding one by one; ids {'equal' if one['equal'] else 'DIFFER'}"
        )


if __name__ == "__main__":
    main()
