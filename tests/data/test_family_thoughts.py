"""Thoughts in families that show them: kept, left out, or opened by the prompt."""

from __future__ import annotations

from typing import Any

import pytest

from .family_masks import NO_THOUGHT, TALK, bracketed, check_borders, conversation, encoder_of

THOUGHT = (
    ("user", "Hi"),
    {"role": "assistant", "content": "Hello.", "reasoning_content": "Oh."},
    ("user", "Why?"),
    {"role": "assistant", "content": "So.", "reasoning_content": "Hm."},
)
_ASKED = "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
_THEN = f"{_ASKED}Hello.<|im_end|>\n<|im_start|>user\nWhy?<|im_end|>\n<|im_start|>assistant\n"


@pytest.mark.parametrize(
    ("turns", "arguments", "rows"),
    [
        (
            THOUGHT,
            {},
            [
                f"{_ASKED}⟦<think>\nOh.\n</think>\n\nHello.<|im_end|>⟧\n",
                f"{_THEN}⟦<think>\nHm.\n</think>\n\nSo.<|im_end|>⟧\n",
            ],
        ),
        # Without thoughts the finished turn shows an empty block, which nobody wrote.
        (TALK, {}, [f"{_ASKED}{NO_THOUGHT}⟦Hello.<|im_end|>⟧\n", f"{_THEN}{NO_THOUGHT}⟦So.<|im_end|>⟧\n"]),
        (
            TALK,
            {"enable_thinking": False},
            [f"{_ASKED}{NO_THOUGHT}⟦Hello.<|im_end|>⟧\n", f"{_THEN}{NO_THOUGHT}⟦So.<|im_end|>⟧\n"],
        ),
    ],
)
def test_qwen_3_thinks_or_not(
    tokenizers: dict[str, Any], turns: Any, arguments: dict[str, Any], rows: list[str]
) -> None:
    tokenizer, encoder = tokenizers["qwen-3"], encoder_of(tokenizers, "qwen-3", **arguments)
    talk = conversation(*turns)
    made = encoder.rows(talk)
    assert [bracketed(tokenizer, row) for row in made] == rows
    if turns is THOUGHT or arguments:
        check_borders(tokenizer, encoder, talk, made, **arguments)


@pytest.mark.parametrize(
    "answer",
    [
        {"content": "<think>\nOh.\n</think>\n\nHello."},
        {"content": "Oh.\n</think>\n\nHello."},  # as a server gives it that parses no thoughts
        {"content": "Hello.", "reasoning_content": "Oh."},
    ],
)
def test_a_thought_goes_on_behind_the_prompt_that_opened_it(
    tokenizers: dict[str, Any], answer: dict[str, str]
) -> None:
    talk = conversation(("user", "Hi"), {"role": "assistant", **answer})
    (row,) = encoder_of(tokenizers, "deepseek").rows(talk)
    assert bracketed(tokenizers["deepseek"], row) == (
        "<｜begin▁of▁sentence｜><｜User｜>Hi<｜Assistant｜><think>\n⟦Oh.\n</think>\n\nHello.<｜end▁of▁sentence｜>⟧"
    )
