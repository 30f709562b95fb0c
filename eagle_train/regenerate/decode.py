"""Plain decoding of many prompts at once, each as if it were alone.

Prompts are taken longest first. What a row draws depends on its own seed and logits, so an answer does not
depend on its neighbours, beyond the rounding of sums over batches of another shape.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from eagle_train.decoding.law import own_law
from eagle_train.decoding.sampling import Sampling, distribution, processed
from eagle_train.regenerate.answers import AnswerSettings
from eagle_train.regenerate.slots import Slots, check_decodable
from eagle_train.targets.load import Target

_PREFILL_TOKENS = 8192  # of one forward over prompts, padding included


@dataclass(frozen=True)
class Job:
    """One prompt to continue by at most `limit` tokens. `number` is the caller's."""

    number: int
    prompt: Sequence[int]
    limit: int
    seed: int


@dataclass(frozen=True)
class Made:
    """What became of a job: its tokens, the end-of-turn token last exactly when `finished`."""

    number: int
    ids: list[int]
    finished: bool


@dataclass
class _Row:
    """A job under way. `chance` is drawn from once a token."""

    job: Job
    chance: torch.Generator
    ids: list[int] = field(default_factory=list)


@dataclass(frozen=True)
class _Rule:
    """How tokens are chosen, and which end a text."""

    sampling: Sampling
    min_gap: float
    stop_ids: frozenset[int]


def sampling_of(target: Target, settings: AnswerSettings) -> Sampling:
    """Return the law that answers are drawn from, the target's own processors included."""
    sampling = Sampling(settings.temperature, top_p=settings.top_p)
    return own_law(target, sampling) if settings.processors else sampling


@torch.inference_mode()
def decode(
    target: Target,
    jobs: Iterable[Job],
    settings: AnswerSettings,
    stop_ids: Collection[int],
    num_slots: int,
) -> Iterator[Made]:
    """Continue all prompts, `num_slots` at a time; yield each as it ends, at one of `stop_ids` or its limit.

    Greedy ids are those of decoding each prompt alone; sampled ones follow the target's law after
    temperature and top-p, both after what the target's own processors make of its logits. Raises UserError
    for targets with layers of an unknown kind, or processors that are no function of the text.
    """
    check_decodable(target)
    rule = _Rule(sampling_of(target, settings), settings.min_gap, frozenset(stop_ids))
    queue = deque(sorted(jobs, key=lambda job: -len(job.prompt)))
    rows: list[_Row | None] = [None] * min(num_slots, len(queue))
    slots = Slots(target, len(rows))
    while queue or any(rows):
        free = [slot for slot, row in enumerate(rows) if row is None]
        if queue and (len(free) >= max(1, len(rows) // 8)):
            yield from _admit(queue, free, rows, slots, rule)
        elif not queue and 2 * len(free) > len(rows):
            kept = [slot for slot, row in enumerate(rows) if row is not None]
            slots.shrink(kept)
            rows = [rows[slot] for slot in kept]
        if any(rows):
            logits = slots.step([row.ids[-1] if row else 0 for row in rows])
            yield from _take(logits, range(len(rows)), rows, slots, rule)


def _admit(
    queue: deque[Job],
    free: list[int],
    rows: list[_Row | None],
    slots: Slots,
    rule: _Rule,
) -> Iterator[Made]:
    """Fill free slots with the next prompts, in groups that one forward can take."""
    used = [slot for slot, row in enumerate(rows) if row]
    if used and 2 * max(slots.lengths[slot] for slot in used) < slots.width:
        slots.shrink(range(len(rows)))
    while queue and free:
        count = min(len(free), len(queue), max(1, _PREFILL_TOKENS // len(queue[0].prompt)))
        taken, free = free[:count], free[count:]
        for slot in taken:
            job = queue.popleft()
            rows[slot] = _Row(job, torch.Generator().manual_seed(job.seed))
        logits = slots.admit(taken, [row.job.prompt for slot in taken if (row := rows[slot])])
        yield from _take(logits, taken, rows, slots, rule)


def _take(
    logits: Tensor,
    places: Sequence[int],
    rows: list[_Row | None],
    slots: Slots,
    rule: _Rule,
) -> Iterator[Made]:
    """Append the token that `logits` [n, V] give to each of the slots `places`; yield what has ended."""
    there = [rows[place] for place in places]
    if rule.sampling.reads_text:
        some = zip(logits.float(), there, strict=True)
        logits = torch.stack([_processed(logits_of, row, rule.sampling) for logits_of, row in some])
    tokens = pick(logits, [row.chance if row else None for row in there], rule.sampling)
    doubtful = _doubtful(logits, rule.min_gap)
    for place, token, doubt in zip(places, tokens, doubtful, strict=True):
        row = rows[place]
        if row is None:
            continue
        if not doubt:
            row.ids.append(token)
        finished = not doubt and token in rule.stop_ids
        if finished or doubt or len(row.ids) == row.job.limit:
            rows[place] = None
            slots.free(place)
            yield Made(row.job.number, row.ids, finished)


def _processed(logits: Tensor, row: _Row | None, sampling: Sampling) -> Tensor:
    """Return a row's logits [V] after the target's own processors."""
    if row is None:
        return logits
    return processed(logits, [*row.job.prompt, *row.ids], sampling, len(row.job.prompt))


def pick(logits: Tensor, chances: Sequence[torch.Generator | None], sampling: Sampling) -> list[int]:
    """Return one token a row of logits [n, V]: the best, or one drawn by the row's own generator.

    A draw inverts the cumulative law in float64. Rows without a generator get any token.
    """
    if sampling.greedy:
        return logits.argmax(-1).tolist()
    cumulative = distribution(logits, sampling).double().cumsum(-1)
    draws = [
        torch.rand((), generator=chance, dtype=torch.float64).item() if chance else 0.0 for chance in chances
    ]
    total = cumulative[:, -1:]
    points = torch.tensor(draws, dtype=torch.float64, device=logits.device)[:, None] * total
    points = points.minimum(total.nextafter(torch.zeros_like(total)))  # a point at the very end is in no bin
    return torch.searchsorted(cumulative, points, right=True)[:, 0].tolist()


def _doubtful(logits: Tensor, min_gap: float) -> list[bool]:
    """Return for each row whether its two best logits are closer than `min_gap`."""
    if not min_gap:
        return [False] * len(logits)
    best = logits.float().topk(2).values
    return (best[:, 0] - best[:, 1] < min_gap).tolist()
