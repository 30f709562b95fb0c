"""The mask in every family's own format, letter by letter: ⟦ ⟧ stand around what is supervised."""

from __future__ import annotations

from typing import Any

import pytest

from .family_masks import (
    LLAMA_SYSTEM,
    QWEN_SYSTEM,
    TALK,
    WITH_SYSTEM,
    E,
    H,
    bracketed,
    check_borders,
    conversation,
    encoder_of,
)

_VICUNA = (
    "A chat between a curious user and an artificial intelligence assistant. The assistant gives helpful, "
    "detailed, and polite answers to the user's questions. "
)


def _chatml(system: str, *exchanges: tuple[str, str]) -> str:
    said = f"<|im_start|>system\n{system}<|im_end|>\n" if system else ""
    for question, answer in exchanges:
        said += f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n⟦{answer}<|im_end|>⟧\n"
    return said


_EXCHANGES = (("Hi", "Hello."), ("Why?", "So."))


@pytest.mark.parametrize(
    ("name", "turns", "rows"),
    [
        ("llama-2", TALK, ["<s>[INST] Hi [/INST]⟦ Hello. </s>⟧<s>[INST] Why? [/INST]⟦ So. </s>⟧"]),
        (
            "llama-2",
            WITH_SYSTEM,
            [
                "<s>[INST] <<SYS>>\nBe kind.\n<</SYS>>\n\nHi [/INST]⟦ Hello. </s>⟧<s>[INST] Why? [/INST]"
                "⟦ So. </s>⟧"
            ],
        ),
        ("vicuna", TALK, [f"<s>{_VICUNA}USER: Hi ASSISTANT:⟦ Hello.</s>⟧USER: Why? ASSISTANT:⟦ So.</s>⟧"]),
        (
            "vicuna",
            WITH_SYSTEM,
            ["<s>Be kind. USER: Hi ASSISTANT:⟦ Hello.</s>⟧USER: Why? ASSISTANT:⟦ So.</s>⟧"],
        ),
        *(
            (
                "llama-3",
                turns,
                [
                    f"<|begin_of_text|>{LLAMA_SYSTEM}{system}<|eot_id|>{H}user{E}Hi<|eot_id|>"
                    f"{H}assistant{E}⟦Hello.<|eot_id|>⟧{H}user{E}Why?<|eot_id|>"
                    f"{H}assistant{E}⟦So.<|eot_id|>⟧"
                ],
            )
            for turns, system in ((TALK, ""), (WITH_SYSTEM, "Be kind."))
        ),
        ("qwen-2", TALK, [_chatml(QWEN_SYSTEM, *_EXCHANGES)]),
        ("qwen-2", WITH_SYSTEM, [_chatml("Be kind.", *_EXCHANGES)]),
        ("mistral", TALK, ["<s>[INST] Hi[/INST]⟦ Hello.</s>⟧[INST] Why?[/INST]⟦ So.</s>⟧"]),
        (
            "mistral",
            WITH_SYSTEM,  # the system text moves to the last question: each answer has a prompt of its own
            [
                "<s>[INST] Be kind.\n\nHi[/INST]⟦ Hello.</s>⟧",
                "<s>[INST] Hi[/INST] Hello.</s>[INST] Be kind.\n\nWhy?[/INST]⟦ So.</s>⟧",
            ],
        ),
        *(
            (
                "gemma",
                turns,
                [
                    f"<bos><start_of_turn>user\n{system}Hi<end_of_turn>\n<start_of_turn>model\n"
                    "⟦Hello.<end_of_turn>⟧\n<start_of_turn>user\nWhy?<end_of_turn>\n<start_of_turn>model\n"
                    "⟦So.<end_of_turn>⟧\n"
                ],
            )
            for turns, system in ((TALK, ""), (WITH_SYSTEM, "Be kind.\n\n"))
        ),
        *(
            (
                "phi-3",  # the line breaks are part of the tokens before them
                turns,
                [
                    f"{system}<|user|>Hi<|end|><|assistant|>⟦Hello.<|end|>⟧<|user|>Why?<|end|><|assistant|>"
                    "⟦So.<|end|>⟧<|endoftext|>"
                ],
            )
            for turns, system in ((TALK, ""), (WITH_SYSTEM, "<|system|>Be kind.<|end|>"))
        ),
        (
            "deepseek",
            (
                ("user", "Hi"),
                ("assistant", "<think>\nOh.\n</think>\n\nHello."),
                ("user", "Why?"),
                ("assistant", "<think>\nHm.\n</think>\n\nSo."),
            ),
            [
                "<｜begin▁of▁sentence｜><｜User｜>Hi<｜Assistant｜><think>\n"
                "⟦Oh.\n</think>\n\nHello.<｜end▁of▁sentence｜>⟧",
                "<｜begin▁of▁sentence｜><｜User｜>Hi<｜Assistant｜>Hello.<｜end▁of▁sentence｜>"
                "<｜User｜>Why?<｜Assistant｜><think>\n⟦Hm.\n</think>\n\nSo.<｜end▁of▁sentence｜>⟧",
            ],
        ),
    ],
)
def test_what_is_supervised(
    tokenizers: dict[str, Any], name: str, turns: tuple[tuple[str, str], ...], rows: list[str]
) -> None:
    tokenizer, encoder, talk = tokenizers[name], encoder_of(tokenizers, name), conversation(*turns)
    made = encoder.rows(talk)
    assert [bracketed(tokenizer, row) for row in made] == rows
    check_borders(tokenizer, encoder, talk, made)
