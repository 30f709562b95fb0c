"""Kernels for GPUs: called as they want to be, and used only where they agree with plain arithmetic."""

from __future__ import annotations

import warnings
from types import SimpleNamespace

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from eagle_train.heads import fused_cuda
from eagle_train.heads.plain_attention import plain_backward, plain_forward

DTYPES = [torch.bfloat16, torch.float16, torch.float32]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_keys", [45, 70])
def test_kernels_take_what_they_are_given_and_return_these_shapes(dtype, num_keys):
    """Tensors without values, as no GPU is needed: schemas, shapes and dtypes are the kernels' own."""
    q, gradient = (torch.empty(45, 4, 64, device="meta", dtype=dtype) for _ in range(2))
    keys, values = (torch.empty(num_keys, 2, 64, device="meta", dtype=dtype) for _ in range(2))
    causal = num_keys == 45
    out, lse = fused_cuda.forward(q, keys, values, causal, 0.125)
    assert (out.shape, out.dtype) == (q.shape, torch.float32)
    assert (lse.shape, lse.dtype) == ((45, 4), torch.float32)
    back = fused_cuda.backward(gradient, q, keys, values, out, lse, causal, 0.125)
    assert [x.shape for x in back] == [q.shape, keys.shape, values.shape]
    assert {x.dtype for x in back} == {torch.float32}


def kernels(mistake: str = "") -> SimpleNamespace:
    """What the kernels promise, computed on a CPU, with one mistake or none."""

    def one(x):
        return x[0].transpose(0, 1).float()

    def forward(q, keys, values, causal, scale):
        out, lse = plain_forward(one(q), one(keys), one(values), causal, scale)
        return out.to(q.dtype).transpose(0, 1)[None], lse.T[None]

    def backward(gradient, q, keys, values, out, lse, causal, scale):
        if mistake == "own sums":
            lse = plain_forward(one(q), one(keys), one(values), causal, scale)[1].T[None]
        given = [one(x) for x in (gradient, q, keys, values, out)]
        found = plain_backward(*given, lse[0].T, causal, scale)
        return [x.to(q.dtype).transpose(0, 1)[None] for x in found]

    def flash(q, keys, values, dropout, causal, debug, *, scale):
        if mistake == "refuses":
            raise RuntimeError("FlashAttention only supports newer GPUs\nand more words")
        return *forward(q, keys, values, causal and mistake != "no mask", scale), None

    def flash_backward(g, q, k, v, out, lse, cum_q, cum_k, max_q, max_k, dropout, causal, *state, scale):
        assert (max_q, max_k) == (q.shape[2], k.shape[2])
        return backward(g, q, k, v, out, lse, causal, scale)

    def efficient(q, keys, values, bias, with_lse, dropout, causal, *, scale):
        out, lse = forward(q, keys, values, causal, scale)
        return out, torch.nn.functional.pad(lse, (0, -q.shape[2] % 32), value=float("inf")), None, None

    def efficient_backward(g, q, k, v, bias, out, lse, seed, offset, dropout, wanted, causal, *, scale):
        rows = q.shape[2]
        assert lse.shape[2] % 32 == 0
        assert lse[..., rows:].isposinf().all()
        return *backward(g, q, k, v, out, lse[..., :rows], causal, scale), None

    return SimpleNamespace(
        _scaled_dot_product_flash_attention=flash,
        _scaled_dot_product_flash_attention_backward=flash_backward,
        _scaled_dot_product_efficient_attention=efficient,
        _scaled_dot_product_efficient_attention_backward=efficient_backward,
    )


def judged(dtype: torch.dtype) -> bool:
    return fused_cuda.trusted.__wrapped__(torch.device("cpu"), dtype, 16)


@pytest.mark.parametrize("dtype", DTYPES)
def test_kernels_that_keep_their_promise_are_trusted(dtype, monkeypatch):
    monkeypatch.setattr(fused_cuda, "_aten", kernels())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert judged(dtype)
        with torch.autocast("cpu", torch.bfloat16):
            assert judged(dtype)


@pytest.mark.parametrize(
    ("mistake", "words"),
    [
        ("own sums", "part from plain arithmetic by"),
        ("no mask", "part from plain arithmetic by"),
        ("refuses", "they refuse: FlashAttention only supports newer GPUs, training is right"),
    ],
)
def test_others_are_left_aside_with_a_word(mistake, words, monkeypatch):
    monkeypatch.setattr(fused_cuda, "_aten", kernels(mistake))
    with pytest.warns(UserWarning, match="left aside for head_dim 16 in bfloat16") as told:
        assert not judged(torch.bfloat16)
    assert words.split(",")[0] in str(told[0].message)


def test_kernels_are_asked_for_what_they_can_do_and_on_gpus_alone(monkeypatch):
    monkeypatch.setattr(fused_cuda, "trusted", lambda *_: True)
    assert not fused_cuda.takes(torch.empty(1, 1, 64))
    with FakeTensorMode():
        able = {
            (dtype, size): fused_cuda.takes(torch.empty(1, 1, size, device="cuda", dtype=dtype))
            for dtype in (torch.bfloat16, torch.float64)
            for size in (64, 60, 256, 264)
        }
    assert [case for case, yes in able.items() if yes] == [(torch.bfloat16, 64), (torch.bfloat16, 256)]
