"""Every family's template and special tokens, and what its rows look like: ⟦ ⟧ around what is supervised."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from eagle_train.data.conversations import read_record
from eagle_train.data.mask import EncodedRow, Encoder
from eagle_train.data.records import Conversation
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
TALK = (("user", "Hi"), ("assistant", "Hello."), ("user", "Why?"), ("assistant", "So."))
WITH_SYSTEM = (("system", "Be kind."), *TALK)
H, E = "<|start_header_id|>", "<|end_header_id|>\n\n"
LLAMA_SYSTEM = f"{H}system{E}Cutting Knowledge Date: December 2023\nToday Date: 26 Jul 2024\n\n"
QWEN_SYSTEM = "You are Qwen, created by Alibaba Cloud. You are a helpful assistant."
NO_THOUGHT = "<think>\n\n</think>\n\n"


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


def check_borders(
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
