"""The law after temperature, top-k and top-p, and draws from it."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from eagle_train.decoding.sampling import Sampling, SeededChance, distribution, penalised
from eagle_train.errors import UserError


@settings(max_examples=80)
@given(
    seed=st.integers(0, 10_000),
    temperature=st.floats(0.05, 5),
    top_k=st.integers(0, 40),
    top_p=st.floats(0.01, 1),
)
def test_equals_the_processors_of_transformers(seed, temperature, top_k, top_p):
    from transformers import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

    logits = 4 * torch.randn(2, 30, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    scores = TemperatureLogitsWarper(temperature)(None, logits)
    if top_k:
        scores = TopKLogitsWarper(top_k)(None, scores)
    if top_p < 1:
        scores = TopPLogitsWarper(top_p)(None, scores)
    ours = distribution(logits, Sampling(temperature, top_k, top_p))
    torch.testing.assert_close(ours, scores.softmax(-1), atol=1e-12, rtol=0)


@pytest.mark.parametrize("penalty", [0.7, 1.0, 1.3])
def test_the_repetition_penalty_is_that_of_transformers(penalty):
    from transformers import RepetitionPenaltyLogitsProcessor

    logits, text = torch.randn(30, generator=torch.Generator().manual_seed(2)), [4, 4, 29, 0, 17]
    wanted = RepetitionPenaltyLogitsProcessor(penalty)(torch.tensor([text]), logits[None].clone())[0]
    assert torch.equal(penalised(logits, text, penalty), wanted)


def test_works_on_one_dimensional_logits_as_on_rows():
    logits = torch.randn(3, 20, generator=torch.Generator().manual_seed(0))
    for sampling in (Sampling(0.7, top_p=0.8), Sampling(1.3, top_k=5), Sampling()):
        rows = distribution(logits, sampling)
        for row, one in zip(rows, logits, strict=True):
            assert torch.equal(row, distribution(one, sampling))


@pytest.mark.parametrize("sampling", [Sampling(1.0, top_p=1e-9), Sampling(1.0, 1), Sampling(1e-4)])
def test_top_p_near_0_top_k_1_and_temperature_near_0_are_greedy(sampling):
    logits = torch.randn(40, generator=torch.Generator().manual_seed(1))
    assert torch.equal(distribution(logits, sampling), distribution(logits, Sampling()))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize(
    "settings",
    [
        *({"temperature": temperature} for temperature in (1e-4, 1.0, 1e4, 1e39, 1e300)),
        *({"temperature": 1e-4, "top_k": 3, "top_p": top_p} for top_p in (1e-50, 0.5)),
        *({"temperature": 1.0, "repetition_penalty": penalty} for penalty in (5e-324, 1e-40, 1e40, 1e300)),
    ],
)
def test_no_finite_setting_gives_anything_but_a_law(settings, dtype):
    logits = torch.tensor([0.0, -1.0, 3.0, 3.0, -20.0, 400.0, -6e4, 7.5], dtype=dtype)
    sampling = Sampling(**settings)
    law = distribution(penalised(logits, [0, 1, 2, 5], sampling.repetition_penalty), sampling)
    assert float(law.sum()) == pytest.approx(1, abs=1e-5)
    assert 0 <= SeededChance(3).choose(law) < len(logits)


def test_a_temperature_below_all_floats_is_greedy():
    sampling = Sampling(1e-4)
    object.__setattr__(sampling, "temperature", 1e-300)
    logits = torch.tensor([1.0, 2.0, 1.5])
    assert distribution(logits, sampling).tolist() == [0, 1, 0]


def test_half_precision_logits_give_a_float32_law_that_sums_to_1():
    law = distribution(torch.randn(50_000).bfloat16(), Sampling(0.9, top_p=0.95))
    assert law.dtype == torch.float32
    assert float(law.sum()) == pytest.approx(1, abs=1e-5)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"temperature": -1}, "temperature: got -1"),
        ({"temperature": 7e-46}, "temperature: got 7e-46, wanted at least 0.0001; 0 is greedy"),
        ({"temperature": 0.99e-4}, "temperature: got 9.9e-05, wanted at least 0.0001; 0 is greedy"),
        ({"temperature": float("nan")}, "temperature: got nan"),
        ({"top_k": -3}, "top-k: got -3"),
        ({"temperature": float("inf")}, "temperature: got inf"),
        ({"top_p": 1.2}, "top-p: got 1.2"),
        ({"top_p": 0.0}, "top-p: got 0.0, wanted a number above 0, at most 1; temperature 0 is greedy"),
        ({"top_p": float("nan")}, "top-p: got nan"),
        ({"top_p": float("inf")}, "top-p: got inf"),
        ({"repetition_penalty": 0.0}, "repetition-penalty: got 0.0"),
        ({"repetition_penalty": float("nan")}, "repetition-penalty: got nan"),
    ],
)
def test_impossible_settings_are_refused(settings, words):
    with pytest.raises(UserError, match=words):
        Sampling(**settings)


def test_draws_follow_the_law_and_never_hit_a_zero():
    law = torch.tensor([0.0, 0.1, 0.0, 0.6, 0.3, 0.0])
    chance = SeededChance(0)
    draws = torch.tensor([chance.choose(law) for _ in range(4000)]).bincount(minlength=6)
    assert draws[law == 0].sum() == 0
    expected = 4000 * law[law > 0]
    assert float(((draws[law > 0] - expected) ** 2 / expected).sum()) < 13.8  # chi-square, 2 d.f., 1 in 1000


def test_equal_seeds_draw_alike_and_certainty_is_certain():
    law = torch.full((100,), 0.01)
    one, other = SeededChance(5), SeededChance(5)
    assert [one.choose(law) for _ in range(20)] == [other.choose(law) for _ in range(20)]
    assert all(one.accept(1.0) and not one.accept(0.0) for _ in range(200))


def test_the_largest_draw_lands_on_the_last_possible_token(monkeypatch):
    chance = SeededChance(0)
    monkeypatch.setattr(chance, "_uniform", lambda: 1.0)
    assert chance.choose(torch.tensor([0.5, 0.5, 0.0])) == 1
