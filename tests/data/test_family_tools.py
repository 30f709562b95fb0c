"""Calls of tools are answers, their results are not, in every family that shows them."""

from __future__ import annotations

from typing import Any

import pytest

from eagle_train.data.records import Skip

from .family_masks import (
    LLAMA_SYSTEM,
    NO_THOUGHT,
    QWEN_SYSTEM,
    TALK,
    E,
    H,
    bracketed,
    check_borders,
    conversation,
    encoder_of,
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
                + LLAMA_SYSTEM.replace("Cutting", "Environment: ipython\nCutting")
                + f"<|eot_id|>{H}user{E}Functions: [{_SHOWN}]\n\nOslo?<|eot_id|>{H}assistant{E}"
                '⟦{"name": "weather", "parameters": {"in": "Oslo"}}<|eot_id|>⟧'
                f'{H}ipython{E}"{{\\"now\\": \\"rain\\"}}"<|eot_id|>{H}assistant{E}⟦It rains.<|eot_id|>⟧'
            ],
        ),
        (
            "qwen-2",
            [
                f"<|im_start|>system\n{QWEN_SYSTEM}{_QWEN_TOOLS}<|im_start|>assistant\n⟦{_CALLED}<|im_end|>⟧\n"
                f"{_QWEN_RESULT}⟦It rains.<|im_end|>⟧\n"
            ],
        ),
        (
            "qwen-3",  # the last answer shows an empty thought, the call before it does not
            [
                f"<|im_start|>system\n{_QWEN_TOOLS}<|im_start|>assistant\n{NO_THOUGHT}⟦{_CALLED}<|im_end|>⟧\n",
                f"<|im_start|>system\n{_QWEN_TOOLS}<|im_start|>assistant\n{_CALLED}<|im_end|>\n"
                f"{_QWEN_RESULT}{NO_THOUGHT}⟦It rains.<|im_end|>⟧\n",
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
        check_borders(tokenizer, encoder, talk, made)


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
