"""The frozen target: the whole output map, ties kept, damage named."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from eagle_train.errors import UserError
from eagle_train.io.tensors import load_tensors
from eagle_train.shards.frozen_target import FrozenTarget

V, H = 11, 4


def _frozen(tied: bool = True, **fields: object) -> FrozenTarget:
    generator = torch.Generator().manual_seed(0)
    embedding = torch.randn(V, H, generator=generator)
    lm_head = embedding if tied else torch.randn(V, H, generator=generator)
    return FrozenTarget(embedding, lm_head, **fields)  # type: ignore[arg-type]


def test_logits_are_lm_head_then_bias_then_scale_then_cap() -> None:
    bias = torch.arange(V, dtype=torch.float32)
    frozen = _frozen(tied=False, bias=bias, logit_scale=0.5, softcap=2.0)
    hidden = torch.randn(3, 5, H, generator=torch.Generator().manual_seed(1))
    expected = 2.0 * torch.tanh((hidden @ frozen.lm_head.T + bias) * 0.5 / 2.0)
    torch.testing.assert_close(frozen.logits(hidden), expected)


def test_some_rows_of_the_logits_equal_the_same_rows_of_all() -> None:
    frozen = _frozen(bias=torch.arange(V, dtype=torch.float32), softcap=3.0)
    hidden = torch.randn(6, H)
    rows = torch.tensor([7, 0, 10])
    torch.testing.assert_close(frozen.logits(hidden, rows), frozen.logits(hidden)[:, rows])
    assert frozen.restrict(rows).vocab_size == 3
    assert torch.equal(frozen.restrict(rows).embedding, frozen.embedding)


def test_embed_returns_raw_rows() -> None:
    frozen = _frozen()
    assert torch.equal(frozen.embed(torch.tensor([[1, 3]])), frozen.embedding[[1, 3]][None])


def test_hidden_in_another_dtype_is_cast_to_the_lm_head() -> None:
    frozen = _frozen().to(dtype=torch.bfloat16)
    assert frozen.logits(torch.randn(2, H)).dtype == torch.bfloat16


@pytest.mark.parametrize("tied", [True, False])
def test_saved_and_loaded_it_is_the_same_and_ties_stay(tmp_path: Path, tied: bool) -> None:
    config = {"vocab_size": V}
    frozen = _frozen(tied, bias=torch.ones(V), logit_scale=0.25, softcap=30.0, config=config)
    frozen.save(tmp_path)
    again = FrozenTarget.load(tmp_path)
    assert torch.equal(again.embedding, frozen.embedding)
    assert torch.equal(again.lm_head, frozen.lm_head)
    assert again.bias is not None
    assert torch.equal(again.bias, torch.ones(V))
    assert (again.logit_scale, again.softcap, again.config) == (0.25, 30.0, config)
    assert again.tied is tied
    assert again.to(dtype=torch.bfloat16).tied is tied
    stored, _ = load_tensors(tmp_path / "target.safetensors")
    assert ("lm_head" in stored) is not tied


def test_missing_parts_are_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"target\.json: not found; run the same eagle extract again"):
        FrozenTarget.load(tmp_path)
    _frozen(tied=False).save(tmp_path)
    (tmp_path / "target.safetensors").unlink()
    with pytest.raises(UserError, match=r"target\.safetensors: not found"):
        FrozenTarget.load(tmp_path)
