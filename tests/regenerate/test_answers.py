"""Thoughts, seeds, and the order of questions and answers."""

from __future__ import annotations

import pytest

from eagle_train.data.conversations import read_prompts
from eagle_train.errors import UserError
from eagle_train.regenerate.answers import Answer, AnswerSettings, Asked, opens_thinking, without_thinking


@pytest.mark.parametrize(
    ("content", "opened", "left"),
    [
        ("Hello", False, "Hello"),
        ("<think>\nA greeting.\n</think>\n\nHello", False, "Hello"),
        ("A greeting.\n</think>\n\nHello </think>", True, "Hello </think>"),
        ("<think>\nA greeting, and then", False, ""),
        ("A greeting, and then", True, ""),
        ("I <think> so", False, "I <think> so"),
    ],
)
def test_thoughts_are_stripped(content: str, opened: bool, left: str) -> None:
    stripped = without_thinking(Answer(content, True, [1, 2]), opened)
    assert stripped.content == left
    assert stripped.answer_ids == ([1, 2] if left == content else None), "ids are those of the whole answer"
    assert stripped.is_empty == (not left)


def test_a_thought_in_a_field_of_its_own_is_stripped_too() -> None:
    stripped = without_thinking(Answer("Hello", True, [1, 2], reasoning="A greeting."))
    assert stripped.record() == {"role": "assistant", "content": "Hello", "finished": True}


def test_a_prompt_that_opens_a_thought_is_seen() -> None:
    assert opens_thinking("<|im_start|>assistant\n<think>\n")
    assert not opens_thinking("<|im_start|>assistant\n<think>\n\n</think>\n\n")


def test_answers_stand_behind_their_questions() -> None:
    texts = [
        ("system", "S"),
        ("user", "A"),
        ("system", "T"),
        ("user", "B"),
        ("assistant", "old"),
        ("user", "C"),
    ]
    found = read_prompts({"messages": [{"role": role, "content": text} for role, text in texts]}, "file#1")
    asked = Asked("id-0", found)
    new = [{"role": "assistant", "content": text} for text in ("a", "b")]
    assert asked.num_turns == 3
    said = ["".join(message["content"] for message in asked.messages(turn, new[:turn])) for turn in range(3)]
    assert said == ["SA", "SAaTB", "SAaTBbC"]


def test_every_answer_has_a_seed_of_its_own() -> None:
    settings = AnswerSettings(temperature=1.0)
    seeds = {settings.seed_of(row, turn) for row in ("a-0", "a-1", "b-0") for turn in range(3)}
    assert len(seeds) == 9
    assert all(0 <= seed < 2**31 for seed in seeds)
    assert settings.seed_of("a-0", 1) == AnswerSettings(temperature=0.5).seed_of("a-0", 1)
    assert settings.seed_of("a-0", 1) != AnswerSettings(seed=1).seed_of("a-0", 1)


@pytest.mark.parametrize(
    "given",
    [
        {"temperature": -1},
        {"temperature": 1e-310},
        {"temperature": 9e-4},
        {"temperature": float("nan")},
        {"top_p": 0},
        {"top_p": 2},
        {"max_new_tokens": 0},
    ],
)
def test_settings_that_make_no_sense(given: dict[str, float]) -> None:
    with pytest.raises(UserError, match="wanted"):
        AnswerSettings(**given)  # type: ignore[arg-type]
