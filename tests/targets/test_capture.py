"""The tap takes what the forward computes, padded, in pieces or masked. Each family: tests/families."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers

from eagle_train.errors import UserError
from eagle_train.targets.capture import FeatureTap, check_layer_ids, default_layer_ids
from eagle_train.targets.load import Target, load_target


def test_gemma_embeddings_are_stored_raw_and_tapped_scaled() -> None:
    torch.manual_seed(0)
    config = transformers.Gemma2Config(
        vocab_size=96,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
    )
    target = Target("gemma2", None, transformers.AutoModelForCausalLM.from_config(config).eval())
    ids = torch.tensor([[5, 9]])
    with FeatureTap(target, (0,)) as tap:
        captured = tap.forward(ids)
    assert captured.aux is not None
    raw = target.frozen().embed(ids)
    torch.testing.assert_close(captured.aux, raw * 32**0.5, rtol=1e-2, atol=1e-3)


@pytest.fixture(scope="module")
def tiny(tiny_target_dir: Path) -> Target:
    return load_target(tiny_target_dir, device="cpu")


def test_padding_on_the_right_changes_nothing(tiny: Target) -> None:
    ids = torch.randint(3, 290, (3, 40), generator=torch.Generator().manual_seed(0))
    other = ids.clone()
    other[:, 25:] = 0
    with FeatureTap(tiny, (2, 4, 5)) as tap:
        a, b = tap.forward(ids), tap.forward(other)
    assert a.aux is not None
    assert b.aux is not None
    assert torch.equal(a.aux[:, :25], b.aux[:, :25])
    assert torch.equal(a.last[:, :25], b.last[:, :25])


def test_a_cache_continues_where_it_stopped(tiny: Target) -> None:
    ids = torch.randint(3, 290, (1, 30), generator=torch.Generator().manual_seed(0))
    cache = transformers.DynamicCache()
    with FeatureTap(tiny, (2, 4, 5)) as tap:
        whole = tap.forward(ids)
        first = tap.forward(ids[:, :18], cache=cache)
        second = tap.forward(ids[:, 18:], cache=cache)
    assert cache.get_seq_length() == 30
    for name in ("aux", "last"):
        joined = torch.cat([getattr(first, name), getattr(second, name)], dim=1)
        torch.testing.assert_close(joined, getattr(whole, name), rtol=1e-4, atol=1e-4)


def test_positions_and_an_additive_mask_are_passed_on(tiny: Target) -> None:
    ids = torch.randint(3, 290, (1, 6), generator=torch.Generator().manual_seed(0))
    mask = torch.full((1, 1, 6, 6), torch.finfo(torch.float32).min).triu(1)
    mask[0, 0, 5, 2:5] = torch.finfo(torch.float32).min  # the last token sees 0, 1 and itself only
    positions = torch.tensor([[0, 1, 2, 3, 4, 2]])
    with FeatureTap(tiny, (4,)) as tap:
        masked = tap.forward(ids, attention_mask=mask, position_ids=positions)
        short = tap.forward(ids[:, [0, 1, 5]])
    torch.testing.assert_close(masked.last[:, 5], short.last[:, 2], rtol=1e-4, atol=1e-4)


def test_no_lm_head_is_run(tiny: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(hidden: torch.Tensor) -> torch.Tensor:
        raise AssertionError("the lm_head was run")

    monkeypatch.setattr(tiny.lm_head, "forward", refuse)
    with FeatureTap(tiny, (2,)) as tap:
        tap.forward(torch.tensor([[5, 6, 7]]))


def test_hooks_are_gone_afterwards_and_no_layer_means_no_aux(tiny: Target) -> None:
    with FeatureTap(tiny, (2, 4)):
        assert tiny.layers[2]._forward_pre_hooks
    assert not any(layer._forward_pre_hooks for layer in tiny.layers)
    with FeatureTap(tiny, ()) as tap:
        assert tap.forward(torch.tensor([[5]])).aux is None
    with pytest.raises(RuntimeError, match="outside"):
        FeatureTap(tiny, (2,)).forward(torch.tensor([[5]]))


def test_default_layers_are_the_papers_and_refused_where_they_coincide() -> None:
    assert default_layer_ids(32) == (2, 16, 29)
    assert default_layer_ids(7) == (2, 3, 4)
    with pytest.raises(UserError, match=r"6 layers.*--layers"):
        default_layer_ids(6)


@pytest.mark.parametrize("ids", [(2, 2, 3), (3, 1), (-1, 2), (2, 8)])
def test_layers_out_of_order_or_range_are_refused(ids: tuple[int, ...]) -> None:
    with pytest.raises(UserError, match=r"wanted ascending distinct numbers in 0\.\.7"):
        check_layer_ids(ids, 8)
