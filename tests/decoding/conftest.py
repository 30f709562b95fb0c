"""Toy targets, and exact laws of what is decoded with them."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from eagle_train.decoding.sampling import Sampling, distribution, penalised
from eagle_train.targets.load import Target, load_target


@pytest.fixture
def golden_folder() -> Path:
    return Path(__file__).parent.parent / "golden" / "A"


def save_toy(folder: Path, layers: int = 2, seed: int = 11) -> Path:
    """Save a random Llama of six tokens, none of which ends a text."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2}
    config = LlamaConfig(
        vocab_size=6, eos_token_id=None, bos_token_id=None, num_hidden_layers=layers, **sizes
    )
    model = LlamaForCausalLM(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" not in name:
                parameter.normal_(0, 0.35)
    model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def toy(tmp_path_factory: pytest.TempPathFactory) -> Target:
    """A random Llama of two layers and six tokens."""
    return load_target(str(save_toy(tmp_path_factory.mktemp("toy") / "llama")), dtype="fp32", device="cpu")


@pytest.fixture(scope="session")
def toy_draft(tmp_path_factory: pytest.TempPathFactory) -> Target:
    """Another random Llama, of one layer, with the same six tokens."""
    folder = save_toy(tmp_path_factory.mktemp("toy") / "draft", layers=1, seed=3)
    return load_target(str(folder), dtype="fp32", device="cpu")


@pytest.fixture(scope="session")
def law_error(toy: Target) -> Callable[..., float]:
    """law_error(law, prompt, length, sampling): its largest difference from the toy target's own law."""

    @torch.inference_mode()
    def own_law(prompt: list[int], length: int, sampling: Sampling) -> dict[tuple[int, ...], float]:
        law = {(): 1.0}
        for _ in range(length):
            grown = {}
            for text, probability in law.items():
                logits = toy.model(torch.tensor([[*prompt, *text]])).logits[0, -1].double()
                logits = penalised(logits, [*prompt, *text], sampling.repetition_penalty)
                for token, p in enumerate(distribution(logits, sampling).tolist()):
                    grown[(*text, token)] = probability * p
            law = grown
        return law

    def error(law: dict, prompt: list[int], length: int, sampling: Sampling) -> float:
        wanted = own_law(prompt, length, sampling)
        texts = itertools.product(range(6), repeat=length)
        return max(abs(sum(law.values()) - 1), *(abs(law.get(text, 0.0) - wanted[text]) for text in texts))

    return error
