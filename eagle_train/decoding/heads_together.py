"""Several texts drafted in step: one run of the head on the rows of all, each attending to its own text.

All that a head does with a row, its attention left out, knows no other rows, so the rows of all texts are
stacked. Drafters here share one head; each keeps its own text's cache, as when it drafts alone.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from eagle_train.decoding.asking import answered_together
from eagle_train.decoding.drafters import Drafter, HeadDrafter
from eagle_train.decoding.reader import Rows
from eagle_train.decoding.trees import Rows as Growth
from eagle_train.decoding.trees import Tree
from eagle_train.heads.layer import Attend


def observe_all(drafters: Sequence[Drafter], rows: Sequence[Rows]) -> None:
    """Let each drafter observe its text's rows: EAGLE heads together, others one by one."""
    heads = _heads(drafters)
    if len(heads) < 2:
        for drafter, its in zip(drafters, rows, strict=True):
            drafter.observe(its)
        return
    head, frozen = heads[0].head, heads[0].frozen
    readings = [drafter.reading(its) for drafter, its in zip(heads, rows, strict=True)]
    lengths = [len(reading.positions) for reading in readings]
    ends = torch.tensor(lengths, device=readings[0].positions.device).cumsum(0) - 1
    hidden = head.start(torch.cat([reading.features for reading in readings]))  # (sum of m, F) -> (.., H)
    embeds = frozen.embed(torch.cat([reading.next_tokens for reading in readings]))
    positions = torch.cat([reading.positions for reading in readings])
    attend = _each_its_own([reading.attend for reading in readings], lengths)
    outs = head(hidden, embeds, positions, attend, rows=ends)  # (B, H)
    for drafter, reading, out in zip(heads, readings, outs.split(1), strict=True):
        drafter.has_read(reading, out)


def propose_all(drafters: Sequence[Drafter]) -> list[Tree]:
    """Return each drafter's tree: EAGLE heads draft together, others one by one."""
    heads = _heads(drafters)
    if len(heads) < 2:
        return [drafter.propose() for drafter in drafters]
    head, frozen = heads[0].head, heads[0].frozen

    def expand(asked: dict[int, Growth]) -> dict[int, Tensor]:
        steps = {number: heads[number].step(*growth) for number, growth in asked.items()}
        lengths = [len(step.positions) for step in steps.values()]
        embeds = frozen.embed(torch.cat([step.tokens for step in steps.values()]))
        positions = torch.cat([step.positions for step in steps.values()])
        attend = _each_its_own([step.attend for step in steps.values()], lengths)
        carried = head.carry(torch.cat([step.outs for step in steps.values()]))
        out = head(carried, embeds, positions, attend)  # (sum of k, H)
        for (number, step), own in zip(steps.items(), out.split(lengths), strict=True):
            heads[number].has_drafted(step, own)
        return dict(zip(asked, head.logits(out, frozen).split(lengths), strict=True))

    first = head.logits(torch.stack([drafter.last_out for drafter in heads]), frozen)  # (B, D)
    works = [drafter.drafting(own) for drafter, own in zip(heads, first, strict=True)]
    return answered_together(works, expand)


def _heads(drafters: Sequence[Drafter]) -> list[HeadDrafter]:
    """Return the drafters where all use one and the same EAGLE head, else none."""
    found = [drafter for drafter in drafters if isinstance(drafter, HeadDrafter)]
    same = len(found) == len(drafters) and len({id(drafter.head) for drafter in found}) == 1
    return found if same else []


def _each_its_own(attends: Sequence[Attend], lengths: Sequence[int]) -> Attend:
    """Return the attention of stacked rows, `lengths` of each text; queries of their last rows alone too."""

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        asking = list(lengths) if len(q) == len(k) else [1] * len(lengths)
        parts = zip(attends, q.split(asking), k.split(list(lengths)), v.split(list(lengths)), strict=True)
        return torch.cat([own(layer, *part) for own, *part in parts])

    return attend
