"""The benchmark compares two ways to the same loss and the same gradient."""

from __future__ import annotations

import pytest
import torch


@pytest.fixture
def bench(script):
    return script("bench_train")


@pytest.mark.parametrize("share", [1.0, 0.4])
def test_ours_and_the_naive_twin_give_one_loss_and_one_gradient(bench, share):
    case = bench.Case(40, 50, share, "fp32")
    sizes = bench.Sizes(32, 48, 4, 2, 16, 60, steps=3)
    results = []
    for naive in (False, True):
        head, frozen, batch, counts = bench.build(case, sizes, "cpu")
        if naive:
            loss = bench.Naive(head, frozen, 3)(batch, counts)
        else:
            loss = bench.Eagle3Step(head, frozen, num_steps=3)(batch, counts).loss
        loss.backward()
        results.append((loss.detach(), {name: p.grad for name, p in head.named_parameters()}))
    torch.testing.assert_close(results[0][0], results[1][0], rtol=1e-5, atol=0)
    for name, gradient in results[0][1].items():
        wanted = results[1][1][name]
        assert (gradient - wanted).abs().max() < 3e-5 * wanted.abs().max(), name


def test_a_case_reports_its_figures(bench):
    case, sizes = bench.Case.of("40,50,0.5,fp32"), bench.Sizes(32, 48, 4, 2, 16, 60, steps=3)
    found = bench.measure(case, sizes, naive=False, seconds=0.01)
    assert set(found) == {"tokens_per_second", "peak_gib", "share_of_matrix_rate", "matrix_gflops"}
    assert all(value > 0 for value in found.values())
    assert bench.arithmetic(case, sizes) < bench.arithmetic(bench.Case.of("40,50,1.0,fp32"), sizes)
