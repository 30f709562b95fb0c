"""Several ways of decoding on the same prompts, one after the other on each, beside plain decoding."""

from __future__ import annotations

import copy
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from eagle_train.decoding.batch import Job, generate_together
from eagle_train.decoding.drafters import Drafter
from eagle_train.decoding.loop import Generation, OnTokens, Settings, generate, plain
from eagle_train.decoding.reader import TargetReader
from eagle_train.decoding.sampling import SeededChance
from eagle_train.evaluation.figures import Tally, method_figures
from eagle_train.evaluation.methods import Entry
from eagle_train.evaluation.turns import Asked
from eagle_train.evaluation.watch import Watched
from eagle_train.progress import Progress, counted
from eagle_train.targets.load import Target

_WARM_UP_TOKENS = 12
_SECONDS_BETWEEN_NOTES = 0.5
_BATCHES_IN_TURN = 4  # that one method answers before the next goes on


class Comparison:
    """Pools figures of plain decoding and of every entry; notes where greedy answers differ."""

    def __init__(
        self, target: Target, entries: Sequence[Entry], settings: Settings, bar: Progress | None = None
    ) -> None:
        self.target, self.entries, self.settings, self._bar = target, entries, settings, bar
        self._drafters = [Watched(entry.drafter) for entry in entries]
        self.plain = Tally()
        self.tallies = [Tally() for _ in entries]
        self.differences: list[list[dict[str, Any]]] = [[] for _ in entries]
        self._answered = self._turns = 0
        self._unseen = 0  # tokens that the bar has not been told of

    def answer(self, asked: Asked) -> Generation:
        """Answer one prompt with every method; return plain decoding's answer."""
        settings = replace(self.settings, seed=self.settings.seed + asked.number)
        settings = replace(settings, max_new_tokens=asked.limit or settings.max_new_tokens)
        if not self._answered:
            self._warm_up(asked.prompt)
        made: dict[int, Generation] = {}
        for number, drafter in self._in_turn():
            hears = self._ticker(f"{asked.name}, {self._method(number)}")
            if drafter is None:
                made[number] = plain(self.target, asked.prompt, settings, hears)
            else:
                made[number] = generate(self.target, drafter, asked.prompt, settings, hears)
        return self._take(asked, made)

    def answer_together(self, all_asked: Sequence[Asked], size: int) -> list[Generation]:
        """Answer prompts with every method, at most `size` at once; return plain decoding's answers.

        Each draws as it would alone. The methods take turns after a few batches.
        """
        found, size = [], min(size, len(all_asked))
        for start in range(0, len(all_asked), _BATCHES_IN_TURN * size):
            some = all_asked[start : start + _BATCHES_IN_TURN * size]
            if not self._answered:
                self._warm_up_together(some[:size], size)
            made = {}
            for number, _ in self._in_turn():
                hears = self._ticker(f"{size} at once, {self._method(number)}")
                made[number] = self._together(some, number, self.settings, size, hears)
            columns = (dict(zip(made, answers, strict=True)) for answers in zip(*made.values(), strict=True))
            found += [self._take(asked, of_it) for asked, of_it in zip(some, columns, strict=True)]
        return found

    def _together(
        self, some: Sequence[Asked], number: int, settings: Settings, size: int, hears: OnTokens | None
    ) -> list[Generation]:
        watched = self._drafters[number - 1] if number else None
        drafter = self.entries[number - 1].drafter if number else None
        jobs = [
            Job(asked.prompt, copy.copy(drafter), SeededChance(settings.seed + asked.number), asked.limit)
            for asked in some
        ]
        note = None if watched is None else watched.note
        return generate_together(self.target, jobs, settings, size, hears, note)

    def _in_turn(self) -> list[tuple[int, Drafter | None]]:
        """Return all methods by number, plain decoding's being 0; each goes first in its turn."""
        methods = list(enumerate([None, *self._drafters]))
        first = self._turns % len(methods)
        self._turns += 1
        return [*methods[first:], *methods[:first]]

    def _method(self, number: int) -> str:
        return self.entries[number - 1].method if number else "plain"

    def _take(self, asked: Asked, made: dict[int, Generation]) -> Generation:
        """Pool one prompt's answers by method; return plain decoding's."""
        self._answered += 1
        alone, length = made[0], len(asked.prompt)
        self.plain.add(alone, asked.category, length)
        for number, (tally, differences) in enumerate(zip(self.tallies, self.differences, strict=True), 1):
            tally.add(made[number], asked.category, length)
            if self.settings.sampling.greedy and made[number].ids != alone.ids:
                parts = first_difference(self.target, asked.prompt, alone.ids, made[number].ids)
                differences.append({"question": asked.name, "turn": asked.turn + 1, **parts})
        if self._bar is not None:
            most = len(made) * self.settings.max_new_tokens
            self._bar.shorten(most - sum(len(answer.ids) for answer in made.values()))
            self._tell(f"{counted(self._answered, 'prompt')} done, {self.note}")
        return alone

    def _tell(self, note: str) -> None:
        if self._bar is not None:
            self._bar.advance(self._unseen, note)
            self._unseen = 0

    def _ticker(self, name: str, counts: bool = True) -> OnTokens | None:
        """Return what shows the tokens of one answer while it is written, twice a second at most."""
        shown, count = time.monotonic(), 0
        if self._bar is None:
            return None

        def hear(tokens: list[int], accepted: int) -> None:
            nonlocal shown, count
            count += len(tokens)
            self._unseen += len(tokens) if counts else 0
            if time.monotonic() - shown > _SECONDS_BETWEEN_NOTES:
                shown = time.monotonic()
                behind = f"; {self.note}" if self._answered > 1 else ""
                self._tell(f"{name}: {counted(count, 'token')}{behind}")

        return hear

    def _warm_up(self, prompt: list[int]) -> None:
        short = replace(self.settings, max_new_tokens=min(_WARM_UP_TOKENS, self.settings.max_new_tokens))
        hears = self._ticker("warming up", counts=False)
        plain(self.target, prompt, short, hears)
        for drafter in self._drafters:
            generate(self.target, drafter, prompt, short, hears)

    def _warm_up_together(self, some: Sequence[Asked], size: int) -> None:
        short = replace(self.settings, max_new_tokens=min(_WARM_UP_TOKENS, self.settings.max_new_tokens))
        for number in range(len(self.entries) + 1):
            self._together(some, number, short, size, self._ticker("warming up", counts=False))

    @property
    def note(self) -> str:
        """The figures so far, for the progress line."""
        return ", ".join(f"tau {tally.counts.tau:.2f}" for tally in self.tallies)

    def results(self) -> list[dict[str, Any]]:
        """Return every entry's figures."""
        found = []
        columns = zip(self.entries, self._drafters, self.tallies, self.differences, strict=True)
        for entry, drafter, tally, differences in columns:
            named = {"method": entry.method, "source": entry.source}
            drawn = drafter.a_round(self.target.tokenizer)
            lossless = not differences if self.settings.sampling.greedy else None
            figures = method_figures(tally, self.plain, entry.tree)
            proof = {"lossless": lossless, "differences": differences}
            found.append({**named, **figures, **proof, "a_round": drawn})
        return found


def first_difference(target: Target, prompt: list[int], alone: list[int], made: list[int]) -> dict[str, Any]:
    """Say where two greedy answers part, and how near the target's best logits are there.

    `gap` is that between the two best, `below` how far the lower of the two tokens written lies below the
    best. `noise` is how far the ten best move when the same text is read token by token at its end rather
    than in one piece: what the order of summation alone does in the target's dtype.
    """
    pairs = zip(alone, made, strict=False)
    at = next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(alone), len(made)))
    text, written = [*prompt, *alone[:at]], [ids[at] for ids in (alone, made) if at < len(ids)]
    with torch.inference_mode():
        ids = torch.tensor([text], device=target.device)
        logits = target.logits(target.run_body(ids)[0, -1]).float()
        again = _read_in_steps(target, text).float()
    best = logits.topk(min(10, len(logits)))
    return {
        "at": at,
        "plain_token": alone[at] if at < len(alone) else None,
        "token": made[at] if at < len(made) else None,
        "gap": float(best.values[0] - best.values[1]),
        "below": float(best.values[0] - logits[written].min()),
        "best": float(best.values[0]),
        "noise": float((logits - again)[best.indices].abs().max()),
    }


def _read_in_steps(target: Target, text: list[int], steps: int = 8) -> torch.Tensor:
    """Return the logits after `text`, whose last tokens are read one by one."""
    whole = max(1, len(text) - steps)
    with TargetReader(target, ()) as reader:
        last = reader.read(text[:whole]).last[-1]
        for token in text[whole:]:
            last = reader.read([token]).last[-1]
    return target.logits(last)
