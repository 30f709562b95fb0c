"""The vocabulary loss equals soft cross-entropy written out, in values, gradients and hits."""

from __future__ import annotations

import pytest
import torch

from eagle_train.losses import vocabulary
from eagle_train.losses.divergences import DIVERGENCES
from eagle_train.losses.regression import smooth_l1_rows
from eagle_train.losses.vocabulary import vocabulary_loss
from eagle_train.shards.frozen_target import FrozenTarget

R, M, H, D = 37, 11, 16, 50
OUTPUT_MAPS = [
    {},
    {"bias": True},
    {"logit_scale": 0.7},
    {"softcap": 3.0},
    {"bias": True, "logit_scale": 0.5, "softcap": 2.0},
]


def _case(dtype=torch.float64, **settings):
    g = torch.Generator().manual_seed(0)
    draw = lambda *shape: torch.randn(*shape, generator=g, dtype=torch.float64).to(dtype)  # noqa: E731
    if settings.pop("bias", False):
        settings["bias"] = draw(D)
    target = FrozenTarget(draw(D, H), draw(D, H), **settings)
    hidden, weight, last = draw(R, H), draw(D, H), draw(M, H)
    label = torch.randint(M, (R,), generator=g)
    row_weight = torch.rand(R, generator=g, dtype=torch.float64).to(dtype)
    best = target.logits(last).argmax(-1)[label]
    return hidden, weight, target, last, label, best, row_weight


def _top_more(p, log_q, k, weight):
    """HASS: beside the cross-entropy, that of the k likeliest tokens alone."""
    top = p.argsort(-1, descending=True)[:, :k]
    return -(p * log_q).sum(-1) - weight * (p.gather(-1, top) * log_q.gather(-1, top)).sum(-1)


DEFINITIONS = {
    "cross_entropy": lambda p, log_q: -(p * log_q).sum(-1),
    "kl": lambda p, log_q: (p * (p.log() - log_q)).sum(-1),
    "reverse_kl": lambda p, log_q: (log_q.exp() * (log_q - p.log())).sum(-1),
    "tv": lambda p, log_q: 0.5 * (p - log_q.exp()).abs().sum(-1),
    "lk": lambda p, log_q: -(1 - 0.5 * (p - log_q.exp()).abs().sum(-1)).log(),
}


def _written_out(
    hidden,
    weight,
    target,
    last,
    label,
    best,
    row_weight,
    own_map=True,
    divergence="cross_entropy",
    top_k=None,
):
    p = target.logits(last).double().softmax(-1)[label]
    logits = hidden @ weight.T
    if not own_map:
        logits = FrozenTarget(weight, weight, target.bias, target.logit_scale, target.softcap).logits(hidden)
    log_q = logits.double().log_softmax(-1)
    rows = _top_more(p, log_q, *top_k) if top_k else DEFINITIONS[divergence](p, log_q)
    return (rows * row_weight).sum(), rows, logits.argmax(-1) == best


@pytest.mark.parametrize("chunk", [1 << 24, 7 * D, 1])
@pytest.mark.parametrize("block", [1 << 19, 3 * D])
def test_equals_soft_cross_entropy_written_out_for_any_chunking(monkeypatch, chunk, block):
    monkeypatch.setattr(vocabulary, "_LOGITS_AT_ONCE", chunk)
    monkeypatch.setattr(vocabulary, "_BLOCK", block)
    _compare(_case(), own_map=True)


@pytest.mark.parametrize("settings", OUTPUT_MAPS)
def test_a_heads_logits_go_through_the_targets_whole_output_map(settings):
    _compare(_case(**settings), own_map=False)


@pytest.mark.parametrize("divergence", DIVERGENCES)
@pytest.mark.parametrize("own_map", [True, False])
def test_every_divergence_is_what_it_says(divergence, own_map, monkeypatch):
    monkeypatch.setattr(vocabulary, "_BLOCK", 3 * D)
    _compare(_case(bias=True, softcap=2.0), own_map, divergence=divergence)
    assert set(DIVERGENCES) == set(DEFINITIONS)


@pytest.mark.parametrize("k", [1, 10, 2 * D])
def test_top_tokens_are_counted_again_on_their_own(k):
    _compare(_case(), own_map=True, top_k=(k, 0.7))


@pytest.mark.parametrize("divergence", DIVERGENCES)
def test_every_divergence_is_least_where_the_head_equals_the_target(divergence):
    _, _, target, last, label, best, row_weight = _case()
    hidden = last[label].clone().requires_grad_()
    result = vocabulary_loss(
        hidden, target.lm_head, target, last, label, best, row_weight, divergence=divergence
    )
    result.loss.backward()
    if divergence not in ("tv", "lk"):  # which have an edge there
        assert hidden.grad.abs().max() < 1e-12
    assert result.hits.all()
    if divergence != "cross_entropy":
        assert result.rows.abs().max() < 1e-12


@pytest.mark.parametrize("divergence", DIVERGENCES)
def test_every_divergence_stays_finite_far_apart(divergence):
    hidden, weight, target, last, *others = _case(torch.float32)
    large = (1000 * hidden).requires_grad_()
    result = vocabulary_loss(large, weight, target, 1000 * last, *others, divergence=divergence)
    result.loss.backward()
    assert torch.isfinite(result.rows).all()
    assert torch.isfinite(large.grad).all()


def _compare(case, own_map, **options):
    results = []
    for function in (vocabulary_loss, _written_out):
        hidden, weight = (x.clone().requires_grad_() for x in case[:2])
        loss, rows, hits = function(hidden, weight, *case[2:], own_map=own_map, **options)
        (3 * loss).backward()  # a scaled loss scales the gradient
        results.append((loss.detach(), rows.detach(), hits, hidden.grad, weight.grad))
    for mine, wanted in zip(*results, strict=True):
        torch.testing.assert_close(mine, wanted, atol=1e-9, rtol=1e-8)


def test_a_frozen_weight_gets_no_gradient_and_no_graph_means_no_work():
    case = _case()
    hidden = case[0].clone().requires_grad_()
    vocabulary_loss(hidden, *case[1:]).loss.backward()
    assert hidden.grad is not None
    assert case[1].grad is None
    with torch.no_grad():
        result = vocabulary_loss(*case)
    assert not result.loss.requires_grad
    torch.testing.assert_close(result.rows, _written_out(*case)[1], atol=1e-6, rtol=1e-6)


def test_no_rows_give_zero_and_zero_gradients():
    hidden, weight, target, last, label, best, row_weight = _case(torch.float32)
    hidden, weight = hidden[:0].requires_grad_(), weight.requires_grad_()
    result = vocabulary_loss(hidden, weight, target, last, label[:0], best[:0], row_weight[:0])
    result.loss.backward()
    assert result.loss == 0
    assert not weight.grad.any()


def test_autocast_keeps_sums_in_float32_and_stays_near():
    case = _case(torch.float32)
    hidden, weight = (x.clone().requires_grad_() for x in case[:2])
    with torch.autocast("cpu", dtype=torch.bfloat16):
        result = vocabulary_loss(hidden, weight, *case[2:])
    result.loss.backward()
    assert result.loss.dtype == result.rows.dtype == weight.grad.dtype == torch.float32
    exact = [x.clone().requires_grad_() for x in case[:2]]
    _written_out(*exact, *case[2:])[0].backward()
    for mine, wanted in zip((hidden.grad, weight.grad), (x.grad for x in exact), strict=True):
        assert (mine - wanted).abs().max() < 0.02 * wanted.abs().max()


def test_very_likely_and_impossible_tokens_stay_finite():
    hidden, weight, target, last, *others = _case(torch.float32)
    large = (100 * hidden).requires_grad_()
    result = vocabulary_loss(large, weight, target, 100 * last, *others)
    result.loss.backward()
    assert torch.isfinite(result.rows).all()
    assert torch.isfinite(large.grad).all()
    wanted = _written_out(large.detach().double(), weight.double(), target, 100 * last, *others)
    torch.testing.assert_close(result.rows.double(), wanted[1], atol=1e-2, rtol=1e-4)


def test_the_distribution_over_draft_tokens_is_restricted_and_renormalised():
    _, _, target, last, *_ = _case()
    ids = torch.tensor([3, 4, 30])
    whole = target.logits(last).softmax(-1)[:, ids]
    p = target.restrict(ids).logits(last).softmax(-1)
    torch.testing.assert_close(p.double(), whole / whole.sum(-1, keepdim=True), atol=1e-6, rtol=1e-5)


def test_smooth_l1_is_the_mean_over_the_width():
    predicted, wanted = torch.tensor([[0.5, 3.0], [0.0, 0.0]]), torch.tensor([[0.0, 0.0], [0.0, -2.0]])
    torch.testing.assert_close(smooth_l1_rows(predicted, wanted), torch.tensor([(0.125 + 2.5) / 2, 1.5 / 2]))
