"""Questions to decode: the built-in held-out set, a public set by name, or any file in MT-bench form."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

from eagle_train.data.records import category_of
from eagle_train.data.templates import ChatTemplate, TemplateRefused, load_template
from eagle_train.errors import UserError, nearest
from eagle_train.evaluation.hub_questions import SETS, hub_records
from eagle_train.io.paths import os_error

BUILTIN = "heldout.jsonl"


@dataclass(frozen=True)
class Question:
    """One conversation's user turns; a later turn is asked once the earlier ones are answered."""

    id: str
    category: str
    turns: tuple[str, ...]


def read_questions(path: str | Path | None = None, limit: int | None = None) -> list[Question]:
    """Read JSON lines with `question_id`, `category` and `turns`; None reads the built-in held-out set.

    A name of `hub_questions.SETS` that is no file is fetched from the hub.
    With `limit`, that many questions evenly spread over the file, in its order. Raises UserError naming file
    and line.
    """
    name = "the built-in questions" if path is None else str(path)
    if path is not None and str(path) in SETS and not Path(path).exists():
        records = [(record, f"{name}, question {i}") for i, record in enumerate(hub_records(str(path)))]
    else:
        records = list(_records(path, name))
    questions = [_question(record, place) for record, place in records]
    if not questions:
        raise UserError(f"{name}: holds no questions, wanted one JSON object per line")
    if limit is None or limit >= len(questions):
        return questions
    if limit < 1:
        raise UserError(f"num-questions: got {limit}, wanted at least 1")
    return [questions[i * len(questions) // limit] for i in range(limit)]


def _records(path: str | Path | None, name: str) -> Iterator[tuple[Any, str]]:
    try:
        if path is None:
            text = resources.files("eagle_train.data.builtin").joinpath(BUILTIN).read_text(encoding="utf-8")
        else:
            text = Path(path).read_text(encoding="utf-8-sig")
    except FileNotFoundError as error:
        known = ", ".join(SETS)
        raise UserError(f"{name}: No such file, and no public set ({known}){nearest(name, SETS)}") from error
    except IsADirectoryError as error:
        raise UserError(f"{name}: is a folder, wanted a file of JSON lines with turns") from error
    except OSError as error:
        raise os_error(name, error) from error
    except UnicodeDecodeError as error:
        raise UserError(f"{name}: not UTF-8 text ({error}); wanted JSON lines") from error
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        place = f"{name}, line {number}"
        try:
            yield json.loads(line), place
        except (ValueError, RecursionError) as error:
            raise UserError(f"{place}: not valid JSON ({error}); correct or remove the line") from error


def _question(record: Any, place: str) -> Question:
    turns = record.get("turns") if isinstance(record, dict) else None
    if not isinstance(turns, list) or not turns or not all(isinstance(turn, str) for turn in turns):
        raise UserError(
            f'{place}: no turns; wanted MT-bench form, such as {{"question_id": 1, "turns": ["first turn"]}}'
        )
    if any("\ud800" <= letter <= "\udfff" for turn in turns for letter in turn):
        raise UserError(f"{place}: a turn holds half a surrogate pair, which is no text; correct it")
    if not all(turn.strip() for turn in turns):
        raise UserError(f"{place}: an empty turn; remove it")
    return Question(str(record.get("question_id", place)), category_of(record), tuple(turns))


class Conversation:
    """One question being asked: gives the next prompt's tokens, takes the answer."""

    def __init__(self, tokenizer: Any, template: ChatTemplate, question: Question) -> None:
        self._tokenizer, self._template, self._question = tokenizer, template, question
        self._messages: list[dict[str, str]] = []

    def ask(self, turn: int) -> list[int]:
        """Return the prompt of user turn `turn`, history and generation prompt included."""
        self._messages.append({"role": "user", "content": self._question.turns[turn]})
        try:
            text = self._template.render(self._messages, generation_prompt=True)
        except TemplateRefused as error:
            raise UserError(
                f"question {self._question.id}: the chat template refuses it ({error}); give another with "
                "--chat-template, or ask first turns only with --max-turns 1"
            ) from error
        return list(self._tokenizer.encode(text, add_special_tokens=False))

    def answer(self, ids: list[int]) -> None:
        """Add the answer to the history."""
        text = self._tokenizer.decode(ids, skip_special_tokens=True)
        self._messages.append({"role": "assistant", "content": text})


def conversations(
    tokenizer: Any, questions: list[Question], chat_template: str | None = None
) -> Iterator[tuple[Question, Conversation]]:
    """Pair every question with its conversation. Raises UserError where there is no chat template."""
    template = load_template(tokenizer, chat_template)
    for question in questions:
        yield question, Conversation(tokenizer, template, question)
