"""The prompts of all questions' turns in the order of asking, one by one or a turn of all at a time."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from eagle_train.evaluation.questions import Conversation, Question, conversations
from eagle_train.targets.lengths import longest_text
from eagle_train.targets.load import Target


@dataclass(frozen=True)
class Asked:
    """A prompt of a question's turn. `number` is its place among all prompts: its draws are its own."""

    prompt: list[int]
    name: str
    turn: int
    category: str
    number: int
    limit: int | None = None  # of new tokens, where the target's positions leave room for fewer


class Turns:
    """Asks what the target has positions for. A later turn holds the answers that `take` was given."""

    def __init__(
        self,
        target: Target,
        questions: Sequence[Question],
        max_turns: int | None,
        max_new_tokens: int,
        chat_template: str | None,
    ) -> None:
        self._talks = list(conversations(target.tokenizer, list(questions), chat_template))
        self._counts = [len(question.turns[:max_turns]) for question in questions]
        self.total = sum(self._counts)
        self.left_out = self.cut_short = 0
        self._longest = longest_text(target.config) or sys.maxsize
        self._most = max_new_tokens
        self._conversations: dict[int, Conversation] = {}

    def groups(self, batch: int) -> Iterator[list[Asked]]:
        """Yield prompts to answer: one by one, question by question; or with a batch turn by turn.

        Each group's answers must be taken before the next is asked for.
        """
        number, firsts = 0, []
        for count in self._counts:
            firsts.append(number)
            number += count
        if batch == 1:
            order = [[(i, turn)] for i, count in enumerate(self._counts) for turn in range(count)]
        else:
            turns = range(max(self._counts, default=0))
            order = [[(i, t) for i, count in enumerate(self._counts) if t < count] for t in turns]
        over: set[int] = set()
        for places in order:
            asked = [self._ask(i, turn, firsts[i] + turn, over) for i, turn in places if i not in over]
            if group := [one for one in asked if one is not None]:
                yield group

    def _ask(self, i: int, turn: int, number: int, over: set[int]) -> Asked | None:
        question, conversation = self._talks[i]
        prompt = conversation.ask(turn)
        limit = min(self._most, self._longest - len(prompt))
        if limit < 1:  # its history alone fills the target's positions
            self.left_out += self._counts[i] - turn
            over.add(i)
            return None
        self.cut_short += limit < self._most
        self._conversations[number] = conversation
        return Asked(prompt, f"question {question.id}", turn, question.category, number, limit)

    def take(self, asked: Asked, ids: list[int]) -> None:
        """Add an answer to its conversation's history."""
        self._conversations.pop(asked.number).answer(ids)

    def warn(self) -> None:
        """Say what was left out or cut short, if anything was."""
        if self.left_out or self.cut_short:
            warnings.warn(
                f"of {self.total} turns {self.left_out} left out and {self.cut_short} given fewer new "
                "tokens: with their history they would pass the target's last position, "
                f"{self._longest:,}"
            )
