"""Sampling through the whole loop keeps the target's law: summed over all draws, and drawn many times."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
import torch

from eagle_train.decoding.drafters import Chain, Dynamic, HeadDrafter, Shape, Static
from eagle_train.decoding.loop import Settings, generate, plain
from eagle_train.decoding.sampling import Sampling, distribution
from eagle_train.heads.config import HeadConfig
from eagle_train.heads.disk import build_head
from eagle_train.targets.load import Target, load_target

VOCAB, PROMPT, LENGTH = 6, [1, 4, 2], 3
SHAPES: dict[str, Shape] = {
    "chain": Chain(2),
    "static": Static(((0,), (1,), (0, 0), (0, 1), (1, 0))),
    "dynamic": Dynamic(6, 2, 2),
}


@pytest.fixture(scope="module")
def toy(tmp_path_factory: pytest.TempPathFactory) -> Target:
    """A random Llama of two layers and six tokens, none of which ends a text."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(11)
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=VOCAB, eos_token_id=None, bos_token_id=None, **sizes))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" not in name:
                parameter.normal_(0, 0.35)
    folder: Path = tmp_path_factory.mktemp("toy") / "llama"
    model.save_pretrained(folder)
    return load_target(str(folder), dtype="fp32", device="cpu")


def toy_drafter(target: Target, shape: Shape, sampling: Sampling, draft_vocabulary: int) -> HeadDrafter:
    torch.manual_seed(5)
    sizes = {"feature_layers": (0, 1), "draft_vocab_size": draft_vocabulary}
    config = HeadConfig.for_target(target.config.to_dict(), "eagle3", **sizes)
    head = build_head(config, torch.tensor([0, 2, 3, 5]) if draft_vocabulary < VOCAB else None)
    with torch.no_grad():
        head.lm_head.weight.mul_(3)
    return HeadDrafter(head, target, shape, sampling)


@torch.inference_mode()
def target_law(target: Target, sampling: Sampling) -> dict[tuple[int, ...], float]:
    """The exact law of LENGTH tokens, from the model itself."""
    law = {(): 1.0}
    for _ in range(LENGTH):
        grown = {}
        for text, probability in law.items():
            logits = target.model(torch.tensor([[*PROMPT, *text]])).logits[0, -1].double()
            for token, p in enumerate(distribution(logits, sampling).tolist()):
                grown[(*text, token)] = probability * p
        law = grown
    return law


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("draft_vocabulary", [4, 6])
@pytest.mark.parametrize("sampling", [Sampling(0.8, top_k=2), Sampling(1.3, top_p=0.5)], ids=["k", "p"])
def test_the_loops_law_is_the_targets(law_of, toy, shape, draft_vocabulary, sampling):
    drafter = toy_drafter(toy, SHAPES[shape], sampling, draft_vocabulary)
    settings = Settings(max_new_tokens=LENGTH, sampling=sampling, eos_ids=())

    law = law_of(lambda chance: tuple(generate(toy, drafter, PROMPT, settings, chance=chance).ids))
    wanted = target_law(toy, sampling)
    assert sum(law.values()) == pytest.approx(1, abs=1e-6)
    for text in itertools.product(range(VOCAB), repeat=LENGTH):
        assert law.get(text, 0.0) == pytest.approx(wanted[text], abs=2e-6)


def chi_square(target: Target, drafter: HeadDrafter, sampling: Sampling, samples: int) -> tuple[float, int]:
    """Return the statistic of `samples` texts against the exact law, and its degrees of freedom."""
    seen: dict[tuple[int, ...], int] = {}
    for seed in range(samples):
        settings = Settings(max_new_tokens=LENGTH, sampling=sampling, eos_ids=(), seed=seed)
        text = tuple(generate(target, drafter, PROMPT, settings).ids)
        seen[text] = seen.get(text, 0) + 1
    law = {text: p * samples for text, p in target_law(target, sampling).items()}
    assert all(law[text] > 0 for text in seen)
    often = {text: expected for text, expected in law.items() if expected >= 5}
    rest = samples - sum(often.values())
    statistic = sum((seen.get(text, 0) - expected) ** 2 / expected for text, expected in often.items())
    if rest > 5:
        rest_seen = samples - sum(seen.get(text, 0) for text in often)
        statistic += (rest_seen - rest) ** 2 / rest
    return statistic, len(often) - (rest <= 5)


@pytest.mark.parametrize("shape", SHAPES)
def test_many_draws_agree_with_the_law(toy, shape):
    sampling = Sampling(1.0)
    drafter = toy_drafter(toy, SHAPES[shape], sampling, 4)
    statistic, freedom = chi_square(toy, drafter, sampling, 200)
    limit = freedom + 3.1 * (2 * freedom) ** 0.5 + 6  # about 1 in 1000
    assert statistic < limit


@pytest.mark.slow
@pytest.mark.parametrize("shape", SHAPES)
def test_4000_draws_agree_with_the_law(toy, shape):
    sampling = Sampling(0.9, top_p=0.95)
    drafter = toy_drafter(toy, SHAPES[shape], sampling, 4)
    statistic, freedom = chi_square(toy, drafter, sampling, 4_000)
    limit = freedom + 3.1 * (2 * freedom) ** 0.5 + 6  # about 1 in 1000
    assert statistic < limit


def test_a_top_p_near_0_gives_the_greedy_text(toy):
    sampling = Sampling(1.0, top_p=1e-6)
    wanted = plain(toy, PROMPT, Settings(max_new_tokens=20, eos_ids=())).ids
    for shape in SHAPES.values():
        drafter = toy_drafter(toy, shape, sampling, 4)
        got = generate(toy, drafter, PROMPT, Settings(max_new_tokens=20, sampling=sampling, eos_ids=()))
        assert got.ids == wanted


def test_equal_seeds_give_equal_texts_and_other_seeds_others(toy):
    sampling = Sampling(1.0)
    drafter = toy_drafter(toy, Chain(3), sampling, 6)
    texts = [
        generate(
            toy, drafter, PROMPT, Settings(max_new_tokens=30, sampling=sampling, eos_ids=(), seed=seed)
        ).ids
        for seed in (1, 1, 2)
    ]
    assert texts[0] == texts[1] != texts[2]
