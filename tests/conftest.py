"""What tests of every room share: a tiny random target, rows and shards made from it, the real small one."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import settings

# Sums depend on the number of threads, here as in a child process; and tests run beside each other.
os.environ["OMP_NUM_THREADS"] = "1"
settings.register_profile("eagle", deadline=None)  # machines are noisy; no test is timed
settings.load_profile("eagle")
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:  # in the background; children must hear Ctrl-C
    signal.signal(signal.SIGINT, signal.default_int_handler)

_CHATML = (
    "{% if messages[0]['role'] != 'system' %}{{ '<|im_start|>system\nYou are a tiny model.<|im_end|>\n' }}"
    "{% endif %}{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content']"
    " + '<|im_end|>\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
_TEXT = [
    "system You are a tiny model. user assistant What is the capital of France? Paris is the capital.",
    "Tell me a story about the sea and the moon. Once upon a time there was a small boat on the sea.",
    "How do I bake bread? Mix the flour with the water, then let it rest for an hour and bake it.",
]


@pytest.fixture(autouse=True)
def _signals() -> Iterator[None]:
    """A command that ran in this process leaves it deaf to signals; the next test hears them."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.fixture
def no_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    """The hub is not asked, as with HF_HUB_OFFLINE=1."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)


def save_tiny_target(folder: Path, *, seed: int = 0, num_layers: int = 8, tied: bool = True) -> Path:
    """Save a random Llama (hidden 32, vocabulary 300) with its tokenizer, as fp32 safetensors."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    tokenizer = _tiny_tokenizer()
    config = LlamaConfig(
        vocab_size=300,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=num_layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        rms_norm_eps=1e-5,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        tie_word_embeddings=tied,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        dtype="float32",
    )
    generator = torch.Generator().manual_seed(seed)
    model = LlamaForCausalLM(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.copy_(1 + 0.1 * torch.randn(parameter.shape, generator=generator))
            else:
                spread = 0.3 if "embed" in name or "lm_head" in name else 0.5 / parameter.shape[1] ** 0.5 * 4
                parameter.copy_(spread * torch.randn(parameter.shape, generator=generator))
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def _tiny_tokenizer():
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=296,
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    backend.train_from_iterator(_TEXT, trainer)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token="<|im_end|>", pad_token="<|im_end|>", model_max_length=512
    )
    tokenizer.chat_template = _CHATML
    return tokenizer


@pytest.fixture(scope="session")
def tiny_target_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Llama of 8 layers with tied embeddings, on disk."""
    return save_tiny_target(tmp_path_factory.mktemp("target") / "tiny-llama")


@pytest.fixture(scope="session")
def make_tiny_target() -> Callable[..., Path]:
    """`save_tiny_target(folder, seed=0, num_layers=8, tied=True)`, for tests that need another one."""
    return save_tiny_target


@pytest.fixture(scope="session")
def tiny_conversations(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """24 short conversations in messages form, a third of them with two turns."""
    file = tmp_path_factory.mktemp("conversations") / "tiny.jsonl"
    lines = []
    for i in range(24):
        messages = []
        for turn in range(1 + (i % 3 == 0)):
            messages.append(
                {"role": "user", "content": f"Question {i}.{turn}: " + "why is it so? " * (i % 5)}
            )
            messages.append(
                {"role": "assistant", "content": f"Because {i} " + "the sea is deep. " * (1 + i % 7)}
            )
        lines.append(json.dumps({"id": f"c{i}", "messages": messages}))
    file.write_text("\n".join(lines) + "\n")
    return file


@pytest.fixture(scope="session")
def tiny_rows_dir(
    tmp_path_factory: pytest.TempPathFactory, tiny_target_dir: Path, tiny_conversations: Path
) -> Path:
    """Rows prepared from `tiny_conversations`."""
    from eagle_train.data.prepare import prepare

    out = tmp_path_factory.mktemp("rows") / "rows"
    prepare([str(tiny_conversations)], str(tiny_target_dir), out)
    return out


def _tiny_shards(factory: pytest.TempPathFactory, rows: Path, target: Path, features: str) -> Path:
    from eagle_train.targets.extract import extract

    out = factory.mktemp("shards") / features
    extract(
        rows,
        str(target),
        out,
        features=features,
        codec="fp32",
        dtype="fp32",
        device="cpu",
        batch_tokens=512,
        show=False,
    )
    return out


@pytest.fixture(scope="session")
def tiny_shards_dir(
    tmp_path_factory: pytest.TempPathFactory, tiny_rows_dir: Path, tiny_target_dir: Path
) -> Path:
    """EAGLE-3 shards of the tiny rows, fp32."""
    return _tiny_shards(tmp_path_factory, tiny_rows_dir, tiny_target_dir, "eagle3")


@pytest.fixture(scope="session")
def tiny_shards_eagle1_dir(
    tmp_path_factory: pytest.TempPathFactory, tiny_rows_dir: Path, tiny_target_dir: Path
) -> Path:
    """EAGLE-1 shards of the tiny rows, fp32."""
    return _tiny_shards(tmp_path_factory, tiny_rows_dir, tiny_target_dir, "eagle1")


@pytest.fixture(scope="session")
def small_target_dir() -> Path:
    """The real SmolLM2-135M-Instruct. Where it cannot be had: skipped, in CI failed."""
    from eagle_train.errors import UserError
    from eagle_train.targets.builtin import small_target

    try:
        return small_target()
    except UserError as error:
        if os.environ.get("CI"):
            pytest.fail(f"the small target cannot be had in CI: {error}")
        pytest.skip(f"the small target cannot be had: {error}")
