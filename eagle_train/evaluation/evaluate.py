"""Decode a set of questions with a head and without, and report acceptance, speed and losslessness."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from eagle_train.decoding.drafters import Drafter, Dynamic, HeadDrafter, Shape, Static
from eagle_train.decoding.loop import Generation, Settings, generate, plain
from eagle_train.decoding.sampling import Sampling
from eagle_train.evaluation.figures import Tally, method_figures
from eagle_train.evaluation.heads import open_head
from eagle_train.evaluation.questions import Question, conversations, read_questions
from eagle_train.heads.disk import Head
from eagle_train.progress import progress
from eagle_train.targets.load import Target, dtype_name, load_target

_WARM_UP_TOKENS = 12


def evaluate(
    head: str | Path | Head,
    target: str | Path | Target,
    questions: str | Path | Sequence[Question] | None = None,
    drafts: Sequence[Shape] | None = None,
    *,
    sampling: Sampling | None = None,
    max_new_tokens: int = 128,
    num_questions: int | None = None,
    max_turns: int | None = None,
    dtype: str = "auto",
    chat_template: str | None = None,
    trust_remote_code: bool = False,
    device_map: str | None = None,
    seed: int = 0,
    show: bool = True,
) -> dict[str, Any]:
    """Answer every question with plain decoding and with the head under each of `drafts`, in turn.

    `head` is a run (its best), a head directory, a hub id or a loaded head; `target` a name or a loaded
    target; `questions` a file in MT-bench form, a list, or None for the built-in held-out set. A later turn
    is asked on the history with plain decoding's answers, so all methods read the same prompts. A head is
    cast to the target's dtype (a copy of it where a module is given). `drafts` None means the usual tree of
    the head's kind.

    Returns what was run, ``plain``, and under ``results`` one dict per draft; with a single draft its figures
    stand at the top level as well. ``lossless`` says whether all ids equal plain decoding's (greedy; None
    when sampling, where only the law is kept) and ``differences`` lists the first difference of each answer
    with the gap between the target's two best logits there. Raises UserError for anything the user must
    change.
    """
    if not isinstance(target, Target):
        target = load_target(target, dtype=dtype, trust_remote_code=trust_remote_code, device_map=device_map)
    head_name = str(head) if isinstance(head, str | Path) else "as given"
    head = open_head(head) if isinstance(head, str | Path) else copy.deepcopy(head)  # it is cast below
    if questions is None or isinstance(questions, str | Path):
        questions = read_questions(questions, num_questions)
    sampling = sampling or Sampling()
    shapes = list(drafts or [usual_shape(head)])
    drafters = [HeadDrafter(head, target, shape, sampling) for shape in shapes]
    settings = Settings(max_new_tokens=max_new_tokens, sampling=sampling, seed=seed)
    run = _Comparison(target, drafters, settings)
    turns = sum(len(question.turns[:max_turns]) for question in questions)
    with progress("eval", turns, "prompts", show) as bar:
        for question, conversation in conversations(target.tokenizer, list(questions), chat_template):
            for turn in range(len(question.turns[:max_turns])):
                made = run.answer(conversation.ask(turn), f"question {question.id}", turn, question.category)
                conversation.answer(made.ids)
                bar.advance(1, run.note)
    common = {
        "target": target.name,
        "head": head_name,
        "kind": head.config.kind,
        "questions": len(questions),
        "prompts": turns,
        "max_new_tokens": max_new_tokens,
        "temperature": sampling.temperature,
        "top_k": sampling.top_k,
        "top_p": sampling.top_p,
        "dtype": dtype_name(target.dtype),
        "device": str(target.device),
        "threads": torch.get_num_threads(),
    }
    results = run.results([shape.figures for shape in shapes])
    flat = results[0] if len(results) == 1 else {}
    return {
        **common,
        **flat,
        "plain": {
            "tokens": run.plain.new_tokens,
            "tokens_per_second": run.plain.tokens_per_second,
            "tokens_per_second_with_prefill": run.plain.tokens_per_second_with_prefill,
        },
        "results": results,
    }


def usual_shape(head: Head) -> Shape:
    """Return EAGLE-1's static tree for its heads, EAGLE-2's dynamic tree for EAGLE-3 heads."""
    return Static() if head.config.kind == "eagle1" else Dynamic()


class _Comparison:
    """Plain decoding and several drafters on the same prompts, one after the other on each."""

    def __init__(self, target: Target, drafters: Sequence[Drafter], settings: Settings) -> None:
        self.target, self.drafters, self.settings = target, drafters, settings
        self.plain = Tally()
        self.tallies = [Tally() for _ in drafters]
        self.differences: list[list[dict[str, Any]]] = [[] for _ in drafters]
        self._answered = 0

    def answer(self, prompt: list[int], name: str, turn: int, category: str) -> Generation:
        """Answer one prompt with every method; return plain decoding's answer."""
        settings = replace(self.settings, seed=self.settings.seed + self._answered)
        if not self._answered:
            self._warm_up(prompt)
        methods: list[Drafter | None] = [None, *self.drafters]
        first = self._answered % len(methods)  # each method goes first in its turn
        self._answered += 1
        made = {}
        for number in [*range(first, len(methods)), *range(first)]:
            drafter = methods[number]
            if drafter is None:
                made[number] = plain(self.target, prompt, settings)
            else:
                made[number] = generate(self.target, drafter, prompt, settings)
        alone = made[0]
        self.plain.add(alone, category)
        for number, (tally, differences) in enumerate(zip(self.tallies, self.differences, strict=True), 1):
            tally.add(made[number], category)
            if settings.sampling.greedy and made[number].ids != alone.ids:
                place = {"question": name, "turn": turn + 1}
                differences.append({**place, **self._gap(prompt, alone, made[number])})
        return alone

    def _warm_up(self, prompt: list[int]) -> None:
        short = replace(self.settings, max_new_tokens=_WARM_UP_TOKENS)
        plain(self.target, prompt, short)
        for drafter in self.drafters:
            generate(self.target, drafter, prompt, short)

    def _gap(self, prompt: list[int], alone: Generation, made: Generation) -> dict[str, Any]:
        """Say where two greedy answers part, and how near the target's two best logits are there."""
        pairs = zip(alone.ids, made.ids, strict=False)
        at = next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(alone.ids), len(made.ids)))
        ids = torch.tensor([[*prompt, *alone.ids[:at]]], device=self.target.device)
        with torch.inference_mode():
            logits = self.target.logits(self.target.run_body(ids)[0, -1]).float()
        best = logits.topk(2).values
        return {
            "at": at,
            "plain_token": alone.ids[at] if at < len(alone.ids) else None,
            "token": made.ids[at] if at < len(made.ids) else None,
            "gap": float(best[0] - best[1]),
        }

    @property
    def note(self) -> str:
        """The figures so far, for the progress line."""
        return ", ".join(f"tau {tally.counts.tau:.2f}" for tally in self.tallies)

    def results(self, trees: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        """Return every drafter's figures."""
        found = []
        for tree, tally, differences in zip(trees, self.tallies, self.differences, strict=True):
            figures = method_figures(tally, self.plain, tree)
            lossless = not differences if self.settings.sampling.greedy else None
            found.append({**figures, "lossless": lossless, "differences": differences})
        return found
