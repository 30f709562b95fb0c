"""A conversation, its encoder, and the words of it that are supervised."""

from __future__ import annotations

from typing import Any

from eagle_train.data.conversations import read_record
from eagle_train.data.mask import EncodedRow, Encoder
from eagle_train.data.records import Conversation
from eagle_train.data.templates import load_template

TWO_TURNS = [
    ("user", "What is the capital of France?"),
    ("assistant", "Paris is the capital."),
    ("user", "How are you?"),
    ("assistant", "I am fine."),
]


def talk(*turns: tuple[str, str]) -> Conversation:
    found = read_record({"messages": [{"role": role, "content": text} for role, text in turns]}, "test")
    assert isinstance(found, Conversation)
    return found


def encoder_of(tokenizer: Any, chat_template: str | None = None) -> Encoder:
    return Encoder(tokenizer, load_template(tokenizer, chat_template))


def supervised(tokenizer: Any, row: EncodedRow) -> list[str]:
    return [tokenizer.decode(row.input_ids[first : last + 1]) for first, last in row.spans]


def rendered(tokenizer: Any, messages: list[dict[str, str]], generation_prompt: bool) -> list[int]:
    """What an engine feeds: the library's own rendering, tokenised without further special tokens."""
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=generation_prompt)
    return tokenizer(text, add_special_tokens=False)["input_ids"]
