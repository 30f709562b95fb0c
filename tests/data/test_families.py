"""The mask in every family's own format, letter by letter: ⟦ ⟧ stand around what is supervised."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest

from eagle_train.data.conversations import read_record
from eagle_train.data.mask import EncodedRow, Encoder
from eagle_train.data.records import Conversation, Skip
from eagle_train.data.templates import load_template

from . import families


@dataclass(frozen=True)
class Family:
    """A template text (or a built-in's name) and its special tokens; `swallowing` ones eat white space."""

    template: str
    special: tuple[str, ...]
    bos: str = "<s>"
    eos: str = "</s>"
    swallowing: tuple[str, ...] = ()


_QWEN = ("<|im_start|>", "<|im_end|>", "<|endoftext|>", "<tool_call>", "</tool_call>")
_INST = ("[INST]", "[/INST]", "[TOOL_CALLS]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]", "[AVAILABLE_TOOLS]")
FAMILIES = {
    "llama-2": Family("llama-2", ()),
    "vicuna": Family("vicuna", ()),
    "llama-3": Family(
        families.LLAMA_3,
        ("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
        "<|begin_of_text|>",
        "<|eot_id|>",
    ),
    "qwen-2": Family(families.QWEN_2, _QWEN, "<|endoftext|>", "<|im_end|>"),
    "qwen-3": Family(families.QWEN_3, (*_QWEN, "<think>", "</think>"), "<|endoftext|>", "<|im_end|>"),
    "mistral": Family(families.MISTRAL, (*_INST, "[/AVAILABLE_TOOLS]")),
    "gemma": Family(families.GEMMA, ("<bos>", "<start_of_turn>", "<end_of_turn>"), "<bos>", "<end_of_turn>"),
    "phi-3": Family(
        families.PHI_3,
        ("<|endoftext|>",),
        "<s>",
        "<|endoftext|>",
        ("<|system|>", "<|user|>", "<|assistant|>", "<|end|>"),
    ),
    "deepseek": Family(
        families.DEEPSEEK,
        (
            "<｜begin▁of▁sentence｜>",
            "<｜User｜>",
            "<｜Assistant｜>",
            "<｜end▁of▁sentence｜>",
            "<think>",
            "</think>",
        ),
        "<｜begin▁of▁sentence｜>",
        "<｜end▁of▁sentence｜>",
    ),
}


@pytest.fixture(scope="module")
def tokenizers(byte_level: Any) -> dict[str, Any]:
    """Every family's tokenizer with its special tokens, and its template where it is not built in."""
    from tokenizers import AddedToken

    made = {}
    for name, family in FAMILIES.items():
        tokenizer = byte_level(None)
        tokenizer.add_tokens([AddedToken(text, special=True, normalized=False) for text in family.special])
        tokenizer.add_tokens(
            [AddedToken(text, special=True, normalized=False, rstrip=True) for text in family.swallowing]
        )
        tokenizer.bos_token, tokenizer.eos_token = family.bos, family.eos
        tokenizer.chat_template = family.template if "{" in family.template else None
        made[name] = tokenizer
    return made


def encoder_of(tokenizers: dict[str, Any], name: str, **arguments: Any) -> Encoder:
    built_in = None if "{" in FAMILIES[name].template else name
    return Encoder(tokenizers[name], load_template(tokenizers[name], built_in, arguments))


def bracketed(tokenizer: Any, row: EncodedRow) -> str:
    """Return the row's text with ⟦ ⟧ around its spans."""
    said, done = "", 0
    for first, last in row.spans:
        said += tokenizer.decode(row.input_ids[done:first])
        said += "⟦" + tokenizer.decode(row.input_ids[first : last + 1]) + "⟧"
        done = last + 1
    return said + tokenizer.decode(row.input_ids[done:])


def conversation(*turns: tuple[str, str] | dict[str, Any], tools: Any = None) -> Conversation:
    messages = [turn if isinstance(turn, dict) else dict(zip(("role", "content"), turn)) for turn in turns]  # noqa: B905
    found = read_record({"messages": messages, "tools": tools}, "test")
    assert isinstance(found, Conversation)
    return found


TALK = (("user", "Hi"), ("assistant", "Hello."), ("user", "Why?"), ("assistant", "So."))
WITH_SYSTEM = (("system", "Be kind."), *TALK)
_H, _E = "<|start_header_id|>", "<|end_header_id|>\n\n"
_LLAMA_SYSTEM = f"{_H}system{_E}Cutting Knowledge Date: December 2023\nToday Date: 26 Jul 2024\n\n"
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
_QWEN_SYSTEM = "You are Qwen, created by Alibaba Cloud. You are a helpful assistant."


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
                    f"<|begin_of_text|>{_LLAMA_SYSTEM}{system}<|eot_id|>{_H}user{_E}Hi<|eot_id|>"
                    f"{_H}assistant{_E}⟦Hello.<|eot_id|>⟧{_H}user{_E}Why?<|eot_id|>"
                    f"{_H}assistant{_E}⟦So.<|eot_id|>⟧"
                ],
            )
            for turns, system in ((TALK, ""), (WITH_SYSTEM, "Be kind."))
        ),
        ("qwen-2", TALK, [_chatml(_QWEN_SYSTEM, *_EXCHANGES)]),
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
    _check_borders(tokenizer, encoder, talk, made)


def _check_borders(
    tokenizer: Any, encoder: Encoder, talk: Conversation, rows: list[EncodedRow], **arguments: Any
) -> None:
    """The first answer of a row stands behind the library's own prompt; all end with their end of turn."""
    if tokenizer.chat_template is None:
        tokenizer.chat_template = encoder.template.text
    answers = [place for place, turn in enumerate(talk.turns) if turn.role == "assistant"]
    assert encoder.end_of_turn is not None
    for place, row in zip(answers, rows, strict=False):
        text = tokenizer.apply_chat_template(
            talk.messages()[:place],
            tools=list(talk.tools) or None,
            tokenize=False,
            add_generation_prompt=True,
            **arguments,
        )
        assert row.input_ids[: row.spans[0][0]] == tokenizer(text, add_special_tokens=False)["input_ids"]
        for first, last in row.spans:
            assert row.input_ids[last] == encoder.end_of_turn[0]
            assert encoder.end_of_turn[0] not in row.input_ids[first:last]


THOUGHT = (
    ("user", "Hi"),
    {"role": "assistant", "content": "Hello.", "reasoning_content": "Oh."},
    ("user", "Why?"),
    {"role": "assistant", "content": "So.", "reasoning_content": "Hm."},
)
_ASKED = "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
_THEN = f"{_ASKED}Hello.<|im_end|>\n<|im_start|>user\nWhy?<|im_end|>\n<|im_start|>assistant\n"
_NONE = "<think>\n\n</think>\n\n"


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
        (TALK, {}, [f"{_ASKED}{_NONE}⟦Hello.<|im_end|>⟧\n", f"{_THEN}{_NONE}⟦So.<|im_end|>⟧\n"]),
        (
            TALK,
            {"enable_thinking": False},
            [f"{_ASKED}{_NONE}⟦Hello.<|im_end|>⟧\n", f"{_THEN}{_NONE}⟦So.<|im_end|>⟧\n"],
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
        _check_borders(tokenizer, encoder, talk, made, **arguments)


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


TOOLS = [{"type": "function", "function": {"name": "weather"}}]
CALL = {
    "role": "assistant",
    "content": "",
    "tool_calls": [
        {"id": "abcdefghi", "type": "function", "function": {"name": "weather", "arguments": {"in": "Oslo"}}}
    ],
}
RESULT = {"role": "tool", "content": '{"now": "rain"}', "tool_call_id": "abcdefghi"}
USING_TOOLS = (("user", "Oslo?"), CALL, RESULT, ("assistant", "It rains."))
_SHOWN = '{"type": "function", "function": {"name": "weather"}}'
_CALLED = '<tool_call>\n{"name": "weather", "arguments": {"in": "Oslo"}}\n</tool_call>'
_QWEN_TOOLS = f"\n\n# Tools\n\n<tools>\n{_SHOWN}\n</tools><|im_end|>\n<|im_start|>user\nOslo?<|im_end|>\n"
_QWEN_RESULT = (
    '<|im_start|>user\n<tool_response>\n{"now": "rain"}\n</tool_response><|im_end|>\n<|im_start|>assistant\n'
)
_MISTRAL_CALL = '[TOOL_CALLS] [{"name": "weather", "arguments": {"in": "Oslo"}}, "id": "abcdefghi"]</s>'


@pytest.mark.parametrize(
    ("name", "rows"),
    [
        (
            "llama-3",
            [
                "<|begin_of_text|>"
                + _LLAMA_SYSTEM.replace("Cutting", "Environment: ipython\nCutting")
                + f"<|eot_id|>{_H}user{_E}Functions: [{_SHOWN}]\n\nOslo?<|eot_id|>{_H}assistant{_E}"
                '⟦{"name": "weather", "parameters": {"in": "Oslo"}}<|eot_id|>⟧'
                f'{_H}ipython{_E}"{{\\"now\\": \\"rain\\"}}"<|eot_id|>{_H}assistant{_E}⟦It rains.<|eot_id|>⟧'
            ],
        ),
        (
            "qwen-2",
            [
                f"<|im_start|>system\n{_QWEN_SYSTEM}{_QWEN_TOOLS}<|im_start|>assistant\n⟦{_CALLED}<|im_end|>⟧\n"
                f"{_QWEN_RESULT}⟦It rains.<|im_end|>⟧\n"
            ],
        ),
        (
            "qwen-3",  # the last answer shows an empty thought, the call before it does not
            [
                f"<|im_start|>system\n{_QWEN_TOOLS}<|im_start|>assistant\n{_NONE}⟦{_CALLED}<|im_end|>⟧\n",
                f"<|im_start|>system\n{_QWEN_TOOLS}<|im_start|>assistant\n{_CALLED}<|im_end|>\n"
                f"{_QWEN_RESULT}{_NONE}⟦It rains.<|im_end|>⟧\n",
            ],
        ),
        (
            "mistral",
            [
                f"<s>[AVAILABLE_TOOLS] [{_SHOWN}][/AVAILABLE_TOOLS][INST] Oslo?[/INST]⟦{_MISTRAL_CALL}⟧"
                '[TOOL_RESULTS] {"content": {"now": "rain"}, "call_id": "abcdefghi"}[/TOOL_RESULTS]'
                "⟦ It rains.</s>⟧"
            ],
        ),
    ],
)
def test_calls_of_tools_are_answers_and_their_results_are_not(
    tokenizers: dict[str, Any], name: str, rows: list[str]
) -> None:
    tokenizer, encoder = tokenizers[name], encoder_of(tokenizers, name)
    talk = conversation(*USING_TOOLS, tools=TOOLS)
    made = encoder.rows(talk)
    assert [bracketed(tokenizer, row) for row in made] == rows
    assert encoder.shows_tools(talk)
    if name != "qwen-3":
        _check_borders(tokenizer, encoder, talk, made)


def test_templates_that_know_no_tools(tokenizers: dict[str, Any]) -> None:
    talk = conversation(*TALK, tools=TOOLS)
    encoder = encoder_of(tokenizers, "phi-3")
    assert not encoder.shows_tools(talk)
    assert encoder.rows(talk) == encoder.rows(conversation(*TALK))
    with pytest.raises(Skip, match="does not show the answer as given"):
        encoder.rows(conversation(*USING_TOOLS, tools=TOOLS))
    with pytest.raises(Skip, match="does not show a tool call"):
        encoder.rows(conversation(("user", "Oslo?"), {**CALL, "content": "Let me see."}))
    with pytest.raises(Skip, match="refused by the chat template: Conversation roles must alternate"):
        encoder_of(tokenizers, "gemma").rows(
            conversation(("user", "Oslo?"), ("assistant", "Let me see."), RESULT, ("assistant", "It rains."))
        )
    with pytest.raises(Skip, match="Tool call IDs"):
        encoder_of(tokenizers, "mistral").rows(
            conversation(("user", "Oslo?"), CALL, {**RESULT, "tool_call_id": "1"}, ("assistant", "It rains."))
        )
