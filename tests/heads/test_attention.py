"""Fused attention merged by log-sum-exp: runs, values, gradients, low precision, memory."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from eagle_train.heads import fused, plain_attention
from eagle_train.heads.attention import Run, attend_runs, find_runs

from .small import softmax_attention


def _case(rows, starts, num_own, dtype=torch.float64, heads=4, kv_heads=2, hd=8):
    generator = torch.Generator().manual_seed(len(rows))
    draw = lambda *shape: torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)  # noqa: E731
    q, k, v = draw(len(rows), heads, hd), draw(starts[-1], kv_heads, hd), draw(starts[-1], kv_heads, hd)
    own = [(draw(len(rows), kv_heads, hd), draw(len(rows), kv_heads, hd)) for _ in range(num_own)]
    return q, k, v, own


def _dense(q, k, v, own, rows, starts):
    index = torch.arange(len(k))
    document = torch.searchsorted(torch.tensor(starts), index, right=True)
    at = torch.tensor(rows)
    seen = (document[at][:, None] == document) & (index <= at[:, None])
    seen = torch.cat([seen, *[torch.eye(len(rows), dtype=torch.bool) for _ in own]], dim=1)
    return softmax_attention(
        q, torch.cat([k, *[x for x, _ in own]]), torch.cat([v, *[x for _, x in own]]), seen
    )


def _leaves(q, k, v, own):
    leaves = [q, k, v, *[x for pair in own for x in pair]]
    return [x.detach().clone().requires_grad_() for x in leaves]


def _both(rows, starts, num_own, dtype=torch.float64):
    """Values and all gradients of the fused path and of the dense twin, the twin in float64."""
    case = _case(rows, starts, num_own, dtype)
    probe = torch.randn(case[0].shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    results = []
    for fast in (True, False):
        leaves = _leaves(*case)
        work = leaves if fast else [x.double() for x in leaves]
        q, k, v = work[:3]
        own = list(zip(work[3::2], work[4::2], strict=True))
        runs = find_runs(torch.tensor(rows), torch.tensor(starts))
        out = attend_runs(q, k, v, own, runs) if fast else _dense(q, k, v, own, rows, starts)
        (out * probe.to(out.dtype)).sum().backward()
        results.append([out.detach(), *[x.grad for x in leaves]])
    return results


ROWS = st.integers(1, 12).flatmap(
    lambda n: st.tuples(
        st.lists(st.integers(1, 9), min_size=1, max_size=3),
        st.sets(st.integers(0, 26), min_size=1, max_size=n),
    )
)


@settings(max_examples=60)
@given(ROWS, st.integers(0, 3))
def test_equals_dense_attention_for_any_rows_and_documents(case, num_own):
    lengths, chosen = case
    starts = [0]
    for length in lengths:
        starts.append(starts[-1] + length)
    rows = sorted({row % starts[-1] for row in chosen})
    fast, dense = _both(rows, starts, num_own)
    for a, b in zip(fast, dense, strict=True):
        torch.testing.assert_close(a, b, atol=1e-10, rtol=1e-9)


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 2e-6), (torch.bfloat16, 2e-2)])
def test_low_precision_stays_near_the_float64_twin(dtype, bound):
    rows, starts = [*range(30, 120), *range(150, 260)], [0, 140, 260]
    fast, dense = _both(rows, starts, 2, dtype)
    for a, b in zip(fast, dense, strict=True):
        assert a.dtype == dtype
        assert (a.double() - b.double()).abs().max() <= bound * max(1.0, b.abs().max().item())


def test_plain_blocks_equal_the_kernel(monkeypatch):
    q, k, v, _ = _case(list(range(7)), [0, 7], 0)
    gradient = torch.randn(q.shape, dtype=q.dtype)
    monkeypatch.setattr(plain_attention, "_SCORES_AT_ONCE", 3 * 7 * 4)  # blocks of three queries
    for causal in (True, False):
        out, lse = fused.block_forward(q, k, v, causal, 0.3)
        mine = plain_attention.plain_forward(q, k, v, causal, 0.3)
        torch.testing.assert_close(mine[0], out)
        torch.testing.assert_close(mine[1], lse.double(), atol=1e-6, rtol=0)
        back = fused.block_backward(gradient, q, k, v, out, lse, causal, 0.3)
        own = plain_attention.plain_backward(gradient, q, k, v, out, lse, causal, 0.3)
        for a, b in zip(own, back, strict=True):
            torch.testing.assert_close(a, b, atol=1e-6, rtol=1e-6)


def test_runs_are_consecutive_rows_of_one_document():
    runs = find_runs(torch.tensor([2, 3, 4, 7, 9, 10, 11]), torch.tensor([0, 4, 10, 12]))
    assert runs == [Run(0, 2, 0, 2), Run(2, 3, 4, 4), Run(3, 4, 4, 7), Run(4, 5, 4, 9), Run(5, 7, 10, 10)]
    assert runs[0].blocks() == [(slice(0, 2), False), (slice(2, 4), True)]
    assert runs[5 - 1].blocks() == [(slice(10, 12), True)]
    assert find_runs(torch.tensor([], dtype=torch.int64), torch.tensor([0, 4])) == []


def test_memory_is_linear_in_length():
    """Nothing of size T x T is made: the largest tensor seen grows with T alone."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class Largest(TorchDispatchMode):
        seen = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            for x in out if isinstance(out, (tuple, list)) else [out]:
                if isinstance(x, torch.Tensor):
                    self.seen = max(self.seen, x.numel())
            return out

    for length in (512, 2048):
        rows = list(range(length // 4, length))
        q, k, v, own = _case(rows, [0, length], 1, torch.float32, heads=2, kv_heads=1)
        leaves = _leaves(q, k, v, own)
        with Largest() as largest:
            runs = find_runs(torch.tensor(rows), torch.tensor([0, length]))
            attend_runs(*leaves[:3], [tuple(leaves[3:])], runs).sum().backward()
        assert largest.seen <= length * 2 * 8
