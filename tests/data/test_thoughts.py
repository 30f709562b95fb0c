"""Thoughts: which of them the target says itself, and which the template puts there."""

from __future__ import annotations

from typing import Any

from eagle_train.data.conversations import read_record

from .talks import TWO_TURNS, encoder_of, rendered, supervised, talk


def test_history_that_the_template_rewrites_gives_one_row_per_answer(byte_level: Any) -> None:
    tokenizer = byte_level("qwen-thinking")
    conversation = talk(
        ("user", "Hi"),
        ("assistant", "<think>\nA greeting.\n</think>\n\nHello"),
        ("user", "How are you?"),
        ("assistant", "<think>\nHow am I?\n</think>\n\nI am fine."),
    )
    rows = encoder_of(tokenizer).rows(conversation)
    assert [supervised(tokenizer, row) for row in rows] == [
        ["<think>\nA greeting.\n</think>\n\nHello<|im_end|>"],
        ["<think>\nHow am I?\n</think>\n\nI am fine.<|im_end|>"],
    ]
    messages = conversation.messages()
    for row, place in zip(rows, (1, 3), strict=True):
        assert row.input_ids[: row.spans[0][0]] == rendered(tokenizer, messages[:place], True)
    assert "A greeting." not in tokenizer.decode(rows[1].input_ids)


def test_a_think_block_the_template_adds_is_not_supervised(byte_level: Any) -> None:
    """Answers without a thought: the finished turn shows an empty think block that nobody wrote."""
    tokenizer = byte_level("qwen-thinking")
    rows = encoder_of(tokenizer).rows(talk(*TWO_TURNS))
    assert [supervised(tokenizer, row) for row in rows] == [
        ["Paris is the capital.<|im_end|>"],
        ["I am fine.<|im_end|>"],
    ]
    for row in rows:
        prompt = tokenizer.decode(row.input_ids[: row.spans[0][0]])
        assert prompt.endswith("<|im_start|>assistant\n<think>\n\n</think>\n\n")


def test_a_think_block_the_generation_prompt_supplies_is_not_supervised(byte_level: Any) -> None:
    """Finished answers do not show the block, so each answer has the prompt that inference has."""
    tokenizer = byte_level("supplies-no-thought")
    conversation = talk(*TWO_TURNS)
    rows = encoder_of(tokenizer).rows(conversation)
    assert [supervised(tokenizer, row) for row in rows] == [
        ["Paris is the capital.<|im_end|>"],
        ["I am fine.<|im_end|>"],
    ]
    for row, place in zip(rows, (1, 3), strict=True):
        assert row.input_ids[: row.spans[0][0]] == rendered(tokenizer, conversation.messages()[:place], True)


def test_a_thought_goes_on_where_the_generation_prompt_opened_it(byte_level: Any) -> None:
    tokenizer = byte_level("opens-thinking")
    conversation = talk(("user", "Hi"), ("assistant", "<think>\nA greeting.\n</think>\n\nHello"))
    (row,) = encoder_of(tokenizer).rows(conversation)
    assert supervised(tokenizer, row) == ["A greeting.\n</think>\n\nHello<|im_end|>"]
    assert tokenizer.decode(row.input_ids[: row.spans[0][0]]).endswith("assistant\n<think>\n")


def test_a_thought_in_a_field_of_its_own_is_part_of_the_answer(byte_level: Any) -> None:
    tokenizer = byte_level("qwen-thinking")
    messages = [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Hello", "reasoning_content": "A greeting."},
    ]
    (row,) = encoder_of(tokenizer).rows(read_record({"messages": messages}, "test"))
    assert supervised(tokenizer, row) == ["<think>\nA greeting.\n</think>\n\nHello<|im_end|>"]
