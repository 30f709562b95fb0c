"""Pretend GPUs, where there are no true ones."""

from __future__ import annotations

from collections.abc import Iterator

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


def _with(count: int) -> Iterator[None]:
    if torch.cuda.is_available():
        pytest.skip("this machine has the true thing")
    with pretend_cuda(count):
        yield
