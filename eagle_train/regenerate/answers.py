"""What is asked, how it is to be answered, and what an answer is."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from eagle_train.data.conversations import read_prompts
from eagle_train.data.reading import Tally, read_with
from eagle_train.data.records import Conversation, Message
from eagle_train.data.sources import Source
from eagle_train.data.token_rows import are_ids
from eagle_train.errors import UserError

_LEAST_TEMPERATURE = 1e-3  # below it logits divided by it overflow, and nothing but the best is drawn
_THINK, _ANSWER = "<think>", "</think>"


@dataclass(frozen=True)
class AnswerSettings:
    """How answers are made. Temperature 0 is greedy; `max_new_tokens` bounds one answer, thoughts included.

    With `min_gap` a greedy answer ends (unfinished) before the first token whose two best logits are closer
    than that, so that no order of summation can turn the text into something else. `processors` applies
    those of logits that the target's generation_config sets; a server goes by settings of its own.
    """

    temperature: float = 0.0
    top_p: float = 1.0
    max_new_tokens: int = 1024
    seed: int = 0
    keep_thinking: bool = True
    min_gap: float = 0.0
    processors: bool = True

    def __post_init__(self) -> None:
        if self.temperature != 0 and not _LEAST_TEMPERATURE <= self.temperature < float("inf"):
            raise UserError(
                f"temperature: got {self.temperature}, wanted 0 (greedy) or at least {_LEAST_TEMPERATURE}"
            )
        if not 0 < self.top_p <= 1:
            raise UserError(f"top-p: got {self.top_p}, wanted a number above 0, at most 1")
        if self.max_new_tokens < 1:
            raise UserError(f"max-tokens: got {self.max_new_tokens}, wanted at least 1")

    def record(self) -> dict[str, Any]:
        """Return what the output says of these settings."""
        record: dict[str, Any] = {"temperature": self.temperature, "max_new_tokens": self.max_new_tokens}
        if self.temperature:
            record |= {"top_p": self.top_p, "seed": self.seed}
        if self.min_gap:
            record["min_top2_gap"] = self.min_gap
        return {**record, "thinking": "kept" if self.keep_thinking else "stripped"}

    def seed_of(self, row_id: str, turn: int) -> int:
        """Return the seed of one answer, the same whatever else is answered and in which order."""
        digest = hashlib.sha256(f"{self.seed}:{row_id}:{turn}".encode()).digest()
        return int.from_bytes(digest[:4], "big") >> 1


@dataclass(frozen=True)
class Answer:
    """One answer. `answer_ids` are its tokens, the end-of-turn token last exactly when `finished`."""

    content: str
    finished: bool
    answer_ids: list[int] | None = None
    reasoning: str | None = None
    tool_calls: list[Message] | None = None

    @property
    def is_empty(self) -> bool:
        """True when nothing is said: the conversation ends before such an answer."""
        return not self.content.strip() and not self.tool_calls

    def message(self) -> Message:
        """Return the answer as the next prompt's history has it."""
        message: Message = {"role": "assistant", "content": self.content}
        if self.reasoning is not None:
            message["reasoning_content"] = self.reasoning
        if self.tool_calls:
            message["tool_calls"] = self.tool_calls
        return message

    def record(self) -> Message:
        """Return the answer as a record of the output has it."""
        ids = {} if self.answer_ids is None else {"answer_ids": self.answer_ids}
        return {**self.message(), **ids, "finished": self.finished}

    @classmethod
    def checked(cls, content: Any, finished: Any, ids: Any, reasoning: Any, calls: Any) -> Answer:
        """Return the answer made of values from outside. Raises ValueError where they do not make one."""
        if not isinstance(content, str):
            raise ValueError(f"the text is a {type(content).__name__}, wanted a string")
        if not isinstance(finished, bool):
            raise ValueError(f"finished is a {type(finished).__name__}, wanted true or false")
        if ids is not None and not are_ids(ids):
            raise ValueError("the token ids are not a list of numbers from 0 to 2**31 - 1")
        if reasoning is not None and not isinstance(reasoning, str):
            raise ValueError(f"the thought is a {type(reasoning).__name__}, wanted a string")
        if calls is not None and not _are_calls(calls):
            raise ValueError("tool_calls is not a list of calls of functions")
        return cls(content, finished, ids, reasoning, calls)

    @classmethod
    def of_record(cls, record: Message) -> Answer:
        """Return the answer that `record` was made of. Raises KeyError or ValueError for others."""
        return cls.checked(
            record["content"],
            record["finished"],
            record.get("answer_ids"),
            record.get("reasoning_content"),
            record.get("tool_calls"),
        )


def _are_calls(calls: Any) -> bool:
    return isinstance(calls, list) and all(
        isinstance(call, dict)
        and isinstance(call.get("function"), dict)
        and isinstance(call["function"].get("name"), str)
        for call in calls
    )


def without_thinking(answer: Answer, opened: bool = False) -> Answer:
    """Return what is said after the thought, without token ids: they are those of the whole.

    `opened` says that the prompt opened the thought. An answer cut inside its thought is empty.
    """
    thought, closing, said = answer.content.partition(_ANSWER)
    if not closing:
        begun = opened or thought.lstrip().startswith(_THINK)
        said, stripped = ("" if begun else answer.content), begun or answer.reasoning is not None
    else:
        stripped = True
    if not stripped:
        return answer
    return replace(answer, content=said.lstrip(), reasoning=None, answer_ids=None)


def opens_thinking(prompt: str) -> bool:
    """True when a prompt ends inside a thought."""
    return prompt.rstrip().endswith(_THINK)


@dataclass(frozen=True)
class Asked:
    """A conversation to be answered. `row_id` is the hash of its prompts and the number of its occurrence."""

    row_id: str
    conversation: Conversation

    @property
    def num_turns(self) -> int:
        """The number of answers wanted."""
        return sum(turn.role == "user" for turn in self.conversation.turns)

    def messages(self, turn: int, answers: Sequence[Message]) -> list[Message]:
        """Return the messages up to user turn `turn`, with `answers` to the earlier ones in their places."""
        found: list[Message] = []
        asked = 0
        for message in self.conversation.messages():
            found.append(message)
            if message["role"] == "user":
                if asked == turn:
                    return found
                found.append(answers[asked])
                asked += 1
        return found


def read_asked(sources: list[Source], tally: Tally, skip_bad: bool) -> list[Asked]:
    """Return all conversations to answer, in order. Raises UserError at damage unless `skip_bad`."""
    seen = Counter[str]()
    asked = []
    for found in read_with(read_prompts, sources, tally, skip_bad):
        asked.append(Asked(f"{found.id}-{seen[found.id]}", found))
        seen[found.id] += 1
    return asked
