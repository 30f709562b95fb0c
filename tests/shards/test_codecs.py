"""Codecs: the nearest value that they can store, errors within the bound they state."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from eagle_train.errors import UserError
from eagle_train.shards.codecs import CODECS, check_codec, decode, encode, rounding

N, G, H = 7, 3, 16


def _states(seed: int = 0) -> torch.Tensor:
    """Vectors of very different sizes, one with an outlier, one of zeros."""
    generator = torch.Generator().manual_seed(seed)
    states = torch.randn(N, G, H, generator=generator) * torch.logspace(-6, 4, N)[:, None, None]
    states[2, 1, 5] = 22_000.0
    states[3, 0] = 0.0
    return states.flatten(1)


def _e4m3_values() -> list[float]:
    """All finite values of e4m3 that are not negative, from the definition of the format."""
    below_one = [m * 2.0**-9 for m in range(8)]
    normal = [(1 + m / 8) * 2.0 ** (e - 7) for e in range(1, 16) for m in range(8)]
    return below_one + [value for value in normal if value <= 448]


def _naive(codec: str, vector: list[float]) -> list[float]:
    """The naive twin: scale by the largest, take the nearest value that exists, scale back."""
    values = _e4m3_values() if codec == "fp8" else [float(i) for i in range(128)]
    largest = max(abs(x) for x in vector)
    if largest == 0:
        return [0.0] * len(vector)
    scale = torch.tensor(largest).div(max(values)).item()
    found = []
    for x in vector:
        wanted = torch.tensor(abs(x)).div(scale).item()
        nearest = min(values, key=lambda value: abs(value - wanted))
        found.append(math.copysign(nearest, x) * scale)
    return found


@pytest.mark.parametrize("codec", ["fp8", "int8"])
def test_eight_bit_codecs_equal_the_naive_twin(codec: str) -> None:
    states = _states()
    values, scale = encode(CODECS[codec], states, G)
    assert values.dtype.itemsize == 1
    assert scale is not None
    assert scale.shape == (N, G)
    back = decode(values, scale).unflatten(1, (G, H))
    for n in range(N):
        for g in range(G):
            want = torch.tensor(_naive(codec, states[n, g * H : (g + 1) * H].tolist()))
            torch.testing.assert_close(back[n, g], want, rtol=1e-6, atol=1e-30)


@pytest.mark.parametrize("codec", list(CODECS))
@given(seed=st.integers(0, 1000))
def test_no_value_moves_more_than_the_stated_bound(codec: str, seed: int) -> None:
    states = _states(seed)
    for g in range(G):
        part = states[:, g * H : (g + 1) * H]
        values, scale = encode(CODECS[codec], part, 1)
        back = decode(values, scale)
        bound = rounding(CODECS[codec], back, scale)
        assert bool(((back.float() - part).abs() <= 1.07 * bound).all())  # of the stored, not the true value


@pytest.mark.parametrize(("codec", "most"), [("fp32", 0.0), ("bf16", 2e-3), ("fp8", 3e-2), ("int8", 2e-2)])
def test_the_error_of_ordinary_states_is_small_and_not_zero(codec: str, most: float) -> None:
    states = torch.randn(200, 64, generator=torch.Generator().manual_seed(1))
    back = decode(*encode(CODECS[codec], states, 1)).float()
    error = float((back - states).norm() / states.norm())
    assert error <= most
    assert (error == 0) == (codec == "fp32")


@pytest.mark.parametrize("codec", ["fp8", "int8"])
def test_vectors_next_to_nothing_stay_finite(codec: str) -> None:
    states = torch.tensor([[0.0, -0.0], [1e-40, -1e-42], [1e-31, 1e-33], [3e38, -1e38]])
    back = decode(*encode(CODECS[codec], states, 1))
    assert bool(torch.isfinite(back).all())
    torch.testing.assert_close(back, states, rtol=2**-4, atol=1e-30)


def test_an_outlier_costs_its_own_token_and_layer_alone() -> None:
    states = torch.randn(4, G * H, generator=torch.Generator().manual_seed(2))
    spoilt = states.clone()
    spoilt[1, H + 3] = 1e6  # token 1, layer 1
    a, b = (decode(*encode(CODECS["int8"], x, G)).unflatten(1, (G, H)) for x in (states, spoilt))
    same = (a == b).flatten(2).all(-1)
    assert same.tolist() == [[n != 1 or g != 1 for g in range(G)] for n in range(4)]


def test_what_it_decodes_to_is_chosen_and_unscaled_codecs_are_not_copied() -> None:
    states = _states()
    values, scale = encode(CODECS["fp8"], states, G)
    assert decode(values, scale).dtype == torch.float32
    assert decode(values, scale, torch.bfloat16).dtype == torch.bfloat16
    stored, none = encode(CODECS["bf16"], states, G)
    assert none is None
    assert decode(stored, none, torch.float32) is stored


def test_an_unknown_codec_is_refused_with_the_nearest() -> None:
    with pytest.raises(UserError, match="--codec fp16: wanted one of bf16, fp32, fp8, int8; did you mean"):
        check_codec("fp16")
