"""Pretend GPUs, where there are no true ones."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch

from .pretend import pretend_cuda


@pytest.fixture
def gpu() -> Iterator[None]:
    """One pretend GPU."""
    yield from _with(1)


@pytest.fixture
def gpus() -> Iterator[None]:
    """Two pretend GPUs."""
    yield from _with(2)


@pytest.fixture
def spread() -> Callable[..., dict[str, int]]:
    """`spread(num_layers=8, lm_head=1)`: where the parts of a tiny target lie on two GPUs."""
    return _spread


def _spread(num_layers: int = 8, lm_head: int = 1) -> dict[str, int]:
    places = {"model.embed_tokens": 0, "model.rotary_emb": 0, "model.norm": 1, "lm_head": lm_head}
    return places | {f"model.layers.{i}": int(i >= num_layers // 2) for i in range(num_layers)}


def _with(count: int) -> Iterator[None]:
    if torch.cuda.is_available():
        pytest.skip("this machine has the true thing")
    with pretend_cuda(count):
        yield
