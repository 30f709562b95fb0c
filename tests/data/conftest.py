"""Small tokenizers of the two great families, and chat templates of the kinds found in the wild."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from .family_masks import FAMILIES

CHATML = (
    "{% for message in messages %}"
    "{% if loop.first and message['role'] != 'system' %}"
    "{{ '<|im_start|>system\nBe kind.<|im_end|>\n' }}{% endif %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
# Trims texts, opens with BOS, headers in special tokens.
LLAMA_3 = (
    "{{ bos_token }}{% for message in messages %}"
    "{{ '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n' + message['content'] | trim"
    " + '<|eot_id|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
)
# Reasoning: thoughts are dropped from earlier answers, the last answer always shows a think block.
QWEN_THINKING = (
    "{% for message in messages %}{% set content = message['content'] %}"
    "{% if message['role'] == 'assistant' %}"
    "{% set thought = message.get('reasoning_content', '') %}"
    "{% if '</think>' in content %}"
    "{% set thought = content.split('</think>')[0].split('<think>')[-1].strip('\n') %}"
    "{% set content = content.split('</think>')[-1].lstrip('\n') %}{% endif %}"
    "{% if loop.last %}"
    "{{ '<|im_start|>assistant\n<think>\n' + thought + '\n</think>\n\n' + content + '<|im_end|>\n' }}"
    "{% else %}{{ '<|im_start|>assistant\n' + content + '<|im_end|>\n' }}{% endif %}"
    "{% else %}{{ '<|im_start|>' + message['role'] + '\n' + content + '<|im_end|>\n' }}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
# The generation prompt opens a think block that no finished answer shows.
OPENS_THINKING = (
    "{{ bos_token }}{% for message in messages %}{% if message['role'] == 'assistant' %}"
    "{{ '<|im_start|>assistant\n' + message['content'].split('</think>')[-1].lstrip() + '<|im_end|>\n' }}"
    "{% else %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n<think>\n' }}{% endif %}"
)
# The generation prompt supplies an empty think block that finished answers lack.
SUPPLIES_NO_THOUGHT = CHATML.replace(
    "{{ '<|im_start|>assistant\n' }}{% endif %}",
    "{{ '<|im_start|>assistant\n<think>\n\n</think>\n\n' }}{% endif %}",
)
MISTRAL = (
    "{{ bos_token }}{% for message in messages %}"
    "{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}"
    "{% elif message['role'] == 'user' %}{{ '[INST] ' + message['content'] + ' [/INST]' }}"
    "{% else %}{{ ' ' + message['content'] + eos_token }}{% endif %}{% endfor %}"
)
GEMMA = (
    "{{ bos_token }}{% if messages[0]['role'] == 'system' %}"
    "{{ raise_exception('System role not supported') }}{% endif %}"
    "{% for message in messages %}"
    "{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate') }}{% endif %}"
    "{% set role = 'model' if message['role'] == 'assistant' else message['role'] %}"
    "{{ '<start_of_turn>' + role + '\n' + message['content'] | trim + '<end_of_turn>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}"
)
# No generation prompt at all, and no token that closes an answer.
PLAIN = "{% for turn in messages %}{{ turn['role'] | upper + ': ' + turn['content'] + '\n' }}{% endfor %}"
# Its end-of-turn tokens swallow the white space behind them (see `_SWALLOWING`).
PHI = (
    "{% for message in messages %}"
    "{{ '<|' + message['role'] + '|>\n' + message['content'] + '<|end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}"
)
# A header word that differs from turn to turn, a date, and silence about tools.
DATED = (
    "{{ '<|im_start|>system\nToday is ' + strftime_now('%d %b %Y') + '<|im_end|>\n' }}"
    "{% for message in messages %}{% if message['role'] in ('user', 'assistant') %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endif %}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

_TEXTS = {
    "chatml": CHATML,
    "llama-3": LLAMA_3,
    "qwen-thinking": QWEN_THINKING,
    "opens-thinking": OPENS_THINKING,
    "supplies-no-thought": SUPPLIES_NO_THOUGHT,
    "mistral": MISTRAL,
    "gemma": GEMMA,
    "plain": PLAIN,
    "phi": PHI,
    "dated": DATED,
}
_SPECIAL = [
    *("<s>", "</s>", "<|im_start|>", "<|im_end|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
    *("<start_of_turn>", "<end_of_turn>"),
]
_SWALLOWING = ["<|user|>", "<|assistant|>", "<|end|>"]
_CORPUS = [
    "Hello there, how are you? I am fine. What is the capital of France? Paris is the capital of France.",
    "user assistant system model USER ASSISTANT [INST] think\n\n\n\n  \n\n\nHello\n\nHello\n\n\nParis",
    "A chat between a curious user and an artificial intelligence assistant. gives helpful detailed answers",
] * 3


@pytest.fixture(scope="session")
def byte_level() -> Callable[[str | None], Any]:
    """Make a byte-level BPE tokenizer (GPT-2, Llama-3, Qwen) with the named template, or with none."""
    return lambda name=None: _byte_level(_TEXTS[name] if name else None, swallowing=name == "phi")


@pytest.fixture(scope="session")
def sentence_piece() -> Callable[[str | None], Any]:
    """Make a tokenizer of the Llama-2 kind: every text begins with a space of its own."""
    return lambda name=None: _sentence_piece(_TEXTS[name] if name else None)


@pytest.fixture(scope="session")
def target(tmp_path_factory: pytest.TempPathFactory, byte_level: Any) -> Path:
    """A target's directory with nothing in it but a tokenizer, ChatML its template."""
    folder = tmp_path_factory.mktemp("target")
    byte_level("chatml").save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
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


def _byte_level(template: str | None, swallowing: bool) -> Any:
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=500, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), special_tokens=_SPECIAL
    )
    backend.train_from_iterator(_CORPUS, trainer)
    if swallowing:
        backend.add_special_tokens([AddedToken(text, special=True, rstrip=True) for text in _SWALLOWING])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>")
    tokenizer.chat_template = template
    return tokenizer


def _sentence_piece(template: str | None) -> Any:
    from tokenizers import Tokenizer, decoders, models, normalizers, processors, trainers
    from transformers import PreTrainedTokenizerFast

    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    trained = Tokenizer(models.BPE())
    trained.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    trainer = trainers.BpeTrainer(vocab_size=400, special_tokens=pieces)
    words = [word for text in _CORPUS for word in text.replace("\n", " ").split()]
    trained.train_from_iterator(words, trainer)
    state = json.loads(trained.to_str())
    state["model"] |= {"byte_fallback": True, "unk_token": "<unk>", "fuse_unk": True}
    state["added_tokens"] = [item for item in state["added_tokens"] if item["content"] in pieces[:3]]
    backend = Tokenizer.from_str(json.dumps(state))
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    backend.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", backend.token_to_id("<s>"))]
    )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    )
    tokenizer.chat_template = template
    return tokenizer
