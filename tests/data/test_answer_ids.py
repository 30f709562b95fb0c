"""Answers that come with their token ids are supervised by those ids where they say what the answer says."""

from __future__ import annotations

from typing import Any

import pytest

from eagle_train.data.answer_ids import say
from eagle_train.data.mask import Encoder
from eagle_train.data.records import Conversation, Turn

from .talks import encoder_of, rendered, supervised


def with_ids(encoder: Encoder, ids: list[int], finished: bool, later: bool) -> Conversation:
    turns = [Turn("user", "Hi"), Turn("assistant", "Hello there", tuple(ids), finished)]
    if later:
        turns += [Turn("user", "Bye"), Turn("assistant", "Bye")]
    return Conversation("id", tuple(turns), "test", tokenizer_fingerprint=encoder.fingerprint)


def test_answer_ids_are_used_as_they_are(byte_level: Any) -> None:
    """Here the target wrote its text letter by letter, as the tokeniser never would."""
    tokenizer = byte_level("chatml")
    encoder = encoder_of(tokenizer)
    letters = [tokenizer.convert_tokens_to_ids(letter) for letter in "HelloĠthere"]
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    (row,) = encoder.rows(with_ids(encoder, [*letters, end], True, later=False))
    ((first, last),) = row.spans
    assert row.input_ids[first : last + 1] == [*letters, end]
    assert tokenizer.decode(row.input_ids[last + 1 :]) == "\n"
    # A later prompt holds the text, which has other tokens: then each answer has a row of its own.
    one, two = encoder.rows(with_ids(encoder, [*letters, end], True, later=True))
    assert one == row
    conversation = with_ids(encoder, [*letters, end], True, later=True)
    assert two.input_ids[: two.spans[0][0]] == rendered(tokenizer, conversation.messages()[:3], True)
    assert supervised(tokenizer, two) == ["Bye<|im_end|>"]
    # The tokens of the text itself run on.
    usual = tokenizer("Hello there", add_special_tokens=False)["input_ids"]
    (whole,) = encoder.rows(with_ids(encoder, [*usual, end], True, later=True))
    assert supervised(tokenizer, whole) == ["Hello there<|im_end|>", "Bye<|im_end|>"]


def test_an_unfinished_answer_has_no_supervised_end_of_turn(byte_level: Any) -> None:
    tokenizer = byte_level("chatml")
    encoder = encoder_of(tokenizer)
    letters = tokenizer("Hello there", add_special_tokens=False)["input_ids"]
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    (alone,) = encoder.rows(with_ids(encoder, letters, False, later=False))
    assert alone.input_ids[alone.spans[0][0] :] == letters
    (row,) = encoder.rows(with_ids(encoder, letters, False, later=True))
    first, last = row.spans[0]
    assert row.input_ids[first : last + 1] == letters
    assert row.input_ids[last + 1] == end
    assert row.spans[1][0] > last + 1
    # The same without ids: the text alone is supervised.
    turns = (Turn("user", "Hi"), Turn("assistant", "Hello there", None, False))
    (text,) = encoder.rows(Conversation("id", turns, "test"))
    assert supervised(tokenizer, text) == ["Hello there"]
    assert text.spans[0][1] == len(text.input_ids) - 1


def test_answer_ids_of_another_tokenizer_are_not_used(byte_level: Any) -> None:
    tokenizer = byte_level("chatml")
    encoder = encoder_of(tokenizer)
    turns = (Turn("user", "Hi"), Turn("assistant", "Hello", (3, 4, 5)))
    (row,) = encoder.rows(Conversation("id", turns, "test", tokenizer_fingerprint="another"))
    assert supervised(tokenizer, row) == ["Hello<|im_end|>"]


@pytest.mark.parametrize(
    ("written", "finished", "given", "true"),
    [
        ("Hello there<|im_end|>", True, {"content": "Hello there"}, True),
        (" Hello there\n<|im_end|>", True, {"content": "Hello there"}, True),
        ("<|im_start|>Hello<|im_end|>", True, {"content": "Hello"}, True),
        ("<|im_start|>Hello", False, {"content": "<|im_start|>Hello"}, True),
        ("Hello there", False, {"content": "Hello"}, False),
        ("Hello", False, {"content": "Hello there"}, False),
        ("<think>\nHm.\n</think>\n\nHi", False, {"content": "Hi", "reasoning": "Hm."}, True),
        ("Hm.</think>Hi", False, {"content": "Hi", "reasoning": "Ho."}, False),
        ("Hm.</think>Hi there", False, {"content": "Hi", "reasoning": "Hm."}, False),
        ("Yes<call>add(1)", False, {"content": "Yes", "tool_calls": [{"function": {"name": "add"}}]}, True),
        ("Yes<call>sub(1)", False, {"content": "Yes", "tool_calls": [{"function": {"name": "add"}}]}, False),
        ("", False, {"content": ""}, False),
    ],
)
def test_ids_say_what_the_answer_says(
    byte_level: Any, written: str, finished: bool, given: dict[str, Any], true: bool
) -> None:
    tokenizer = byte_level("chatml")
    ids = tokenizer(written, add_special_tokens=False)["input_ids"]
    assert say(tokenizer, ids, finished, **given) is true


def test_a_letter_cut_in_its_middle_is_no_difference(byte_level: Any) -> None:
    tokenizer = byte_level("chatml")
    ids = tokenizer("Hi \N{SLIGHTLY SMILING FACE}", add_special_tokens=False)["input_ids"][:-1]
    assert say(tokenizer, ids, False, "Hi")
    assert say(tokenizer, ids, False, "Hi \ufffd")
