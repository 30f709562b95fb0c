"""Several prompts continued at once: one forward of the target a round for the trees of all.

Every text is what it would be alone: its own drafter, chance, positions and rows of the cache, and as many
tokens a round as it accepts. Prompts are read one after the other; a text that has ended gives its place to
the next one that waits.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from eagle_train.decoding.asking import answered_together
from eagle_train.decoding.batch_reader import BatchReader
from eagle_train.decoding.drafters import Drafter
from eagle_train.decoding.heads_together import observe_all, propose_all
from eagle_train.decoding.law import LawsTogether
from eagle_train.decoding.loop import Answer, Generation, OnTokens, Settings, checked, now, prefill
from eagle_train.decoding.reader import TargetReader
from eagle_train.decoding.sampling import Chance
from eagle_train.decoding.trees import Tree
from eagle_train.decoding.verify import Stood, walk_block, walk_greedy, walk_sampled
from eagle_train.targets.load import Target

OnRound = Callable[[Tree, list[int]], None]
"""Called with a round's tree and the nodes that stood, unless the round ended its text."""


@dataclass(frozen=True)
class Job:
    """A prompt to continue. `drafter` is its own, or shares nothing but weights; None is plain decoding."""

    prompt_ids: Sequence[int]
    drafter: Drafter | None
    chance: Chance
    limit: int | None = None  # of new tokens, where it is below that of the settings


@dataclass
class _Text:
    """A job under way."""

    job: Job
    prompt: list[int]
    answer: Answer


@torch.inference_mode()
def generate_together(
    target: Target,
    jobs: Sequence[Job],
    settings: Settings,
    size: int,
    on_tokens: OnTokens | None = None,
    on_round: OnRound | None = None,
) -> list[Generation]:
    """Continue all jobs, `size` at a time; return their answers in order.

    Each answer is that of `generate`, or `plain`, alone with the same chance, but for the rounding of sums
    over more rows. `decode_seconds` is a text's share of the rounds it was in: they add up to the time of the
    whole batch. Jobs of one call have drafters of one kind, or none. Raises UserError as `generate` does.
    """
    texts = [_text(target, job, settings, on_tokens) for job in jobs]
    waiting, active = deque(texts), list[_Text]()
    drafter = jobs[0].drafter if jobs else None
    layer_ids = () if drafter is None else drafter.layer_ids
    with BatchReader(target, layer_ids, min(size, len(jobs))) as reader:
        while waiting or active:
            while waiting and len(active) < size:
                text = waiting.popleft()
                if _joins(text, reader, layer_ids, settings):
                    active.append(text)
            if active:
                _round(target, reader, active, settings, on_round)
    return [text.answer.made for text in texts]


def _text(target: Target, job: Job, settings: Settings, on_tokens: OnTokens | None) -> _Text:
    its = replace(settings, max_new_tokens=min(job.limit or sys.maxsize, settings.max_new_tokens))
    return _Text(job, checked(target, job.prompt_ids, its), Answer(target, its, on_tokens))


def _joins(text: _Text, reader: BatchReader, layer_ids: Sequence[int], settings: Settings) -> bool:
    """Read a text's prompt alone and let it join the others, unless its first token ends it."""
    target, began = reader.target, now(reader.target.device)
    with TargetReader(target, layer_ids) as alone:
        prefill(alone, text.job.drafter, text.prompt, text.answer, settings, text.job.chance)
        if not text.answer.finished:
            reader.join(alone)
    text.answer.made.prefill_seconds = now(target.device) - began
    return not text.answer.finished


def _round(
    target: Target,
    reader: BatchReader,
    active: list[_Text],
    settings: Settings,
    on_round: OnRound | None,
) -> None:
    """Draft, read and verify a tree for every active text; those that end leave."""
    began, present = now(target.device), list(active)
    drafters = [text.job.drafter for text in present]
    drafting = [drafter for drafter in drafters if drafter is not None]
    trees = propose_all(drafting) if drafting else [_root_of(text) for text in present]
    seen = reader.read_trees(trees)
    lasts = [one.last[: len(tree) - tree.own] for one, tree in zip(seen, trees, strict=True)]
    written = [[*text.prompt, *text.answer.made.ids] for text in present]
    begun = [len(text.prompt) for text in present]
    laws = LawsTogether(target, settings.sampling, written, trees, lasts, begun)
    walks = [_walk(tree, settings, text.job.chance) for tree, text in zip(trees, present, strict=True)]
    stood = answered_together(walks, laws)
    for text, tree, (path, token) in zip(present, trees, stood, strict=True):
        accepted = None if text.job.drafter is None else len(path)
        text.answer.add([*(tree.tokens[node] for node in path), token], accepted)
    rows = reader.keep(trees, [path for path, _ in stood], [token for _, token in stood], seen)
    go_on = [i for i, text in enumerate(present) if not text.answer.finished]
    if drafting and go_on:
        observe_all([drafting[i] for i in go_on], [rows[i] for i in go_on])
    if drafting and on_round is not None:
        for i in go_on:
            on_round(trees[i], stood[i][0])
    for i in sorted(set(range(len(present))) - set(go_on), reverse=True):
        reader.leave(i)
        active[i] = active[-1]
        active.pop()
    share = (now(target.device) - began) / len(present)
    for text in present:
        text.answer.made.decode_seconds += share


def _root_of(text: _Text) -> Tree:
    """Return plain decoding's tree: the last token, no guesses."""
    return Tree((text.answer.made.ids[-1],), (-1,))


def _walk(tree: Tree, settings: Settings, chance: Chance) -> Generator[int, Any, Stood]:
    """Return the walk down a tree by the rule for how its guesses were drawn."""
    if settings.sampling.greedy:
        return walk_greedy(tree)
    if settings.block and tree.q is not None and tree.is_chain:
        return walk_block(tree, chance)
    return walk_sampled(tree, chance)
