"""Sampling through the whole loop keeps the target's law: summed over all its random draws."""

from __future__ import annotations

import pytest
import torch

from eagle_train.decoding.drafters import HeadDrafter
from eagle_train.decoding.loop import Settings, generate, plain
from eagle_train.decoding.sampling import Sampling
from eagle_train.decoding.shapes import Chain, Dynamic, Sampled, Shape, Static
from eagle_train.heads.config import HeadConfig
from eagle_train.heads.disk import build_head
from eagle_train.targets.load import Target

from .toys import law_of, spied

VOCAB, PROMPT, LENGTH = 6, [1, 4, 2], 3
PENALTY = 1.4
SHAPES: dict[str, Shape] = {
    "chain": Chain(2),
    "static": Static(((0,), (1,), (0, 0), (0, 1), (1, 0))),
    "dynamic": Dynamic(6, 2, 2),
    "sampled": Sampled((2,)),
    "stopping": Chain(2, stop=0.35),
}


def toy_drafter(target: Target, shape: Shape, sampling: Sampling, draft_vocabulary: int) -> HeadDrafter:
    torch.manual_seed(5)
    sizes = {"feature_layers": (0, 1), "draft_vocab_size": draft_vocabulary}
    config = HeadConfig.for_target(target.config.to_dict(), "eagle3", **sizes)
    head = build_head(config, torch.tensor([0, 2, 3, 5]) if draft_vocabulary < VOCAB else None)
    with torch.no_grad():
        head.lm_head.weight.mul_(3)
    return HeadDrafter(head, target, shape, sampling)


@pytest.mark.parametrize(
    ("shape", "block"), [*((shape, False) for shape in SHAPES), ("chain", True), ("stopping", True)]
)
@pytest.mark.parametrize("draft_vocabulary", [4, 6])
@pytest.mark.parametrize("sampling", [Sampling(0.8, top_k=2), Sampling(1.3, top_p=0.5)], ids=["k", "p"])
def test_the_loops_law_is_the_targets(law_error, toy, shape, draft_vocabulary, sampling, block):
    drafter = toy_drafter(toy, SHAPES[shape], sampling, draft_vocabulary)
    settings = Settings(max_new_tokens=LENGTH, sampling=sampling, eos_ids=(), block=block)
    law = law_of(lambda chance: tuple(generate(toy, drafter, PROMPT, settings, chance=chance).ids))
    assert law_error(law, PROMPT, LENGTH, sampling) < 2e-6


@pytest.mark.parametrize("shape", ["chain", "sampled", "static"])
def test_the_law_kept_is_the_one_after_the_repetition_penalty(law_error, toy, shape):
    sampling = Sampling(0.9, top_k=2, repetition_penalty=PENALTY)
    drafter = toy_drafter(toy, SHAPES[shape], sampling, 4)
    settings = Settings(max_new_tokens=LENGTH, sampling=sampling, eos_ids=())
    law = law_of(lambda chance: tuple(generate(toy, drafter, PROMPT, settings, chance=chance).ids))
    assert law_error(law, PROMPT, LENGTH, sampling) < 2e-6
    assert law_error(law, PROMPT, LENGTH, Sampling(0.9, top_k=2)) > 1e-2


def test_a_chain_that_stops_makes_fewer_guesses_where_it_is_unsure(toy):
    lengths = {}
    for stop in (0.0, 0.35, 0.99):
        for sampling in (Sampling(), Sampling(1.0)):
            drafter = toy_drafter(toy, Chain(4, stop), sampling, 6)
            seen = spied(drafter)
            generate(toy, drafter, PROMPT, Settings(max_new_tokens=40, sampling=sampling, eos_ids=()))
            lengths.setdefault(stop, []).extend(len(tree) - 1 for tree in seen)
    assert set(lengths[0.0]) == {4}
    assert set(lengths[0.99]) == {0}
    assert min(lengths[0.35]) < max(lengths[0.35])


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
