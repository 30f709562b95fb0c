"""The pretend device refuses what CUDA refuses, and computes what the CPU computes."""

from __future__ import annotations

import copy
import threading
import warnings

import numpy as np
import pytest
import torch
from torch import nn

from eagle_train.config import OptimRecipe
from eagle_train.heads import fused_cuda
from eagle_train.training.optim import Optimizers

from . import kernels

HERE, THERE = "cpu", "cuda"
flash = torch.ops.aten._scaled_dot_product_flash_attention

FAULTS = {
    "a mask made on the CPU": (lambda x: x.masked_fill(torch.ones(3, 3, dtype=torch.bool), 0), "same device"),
    "a table of the CPU": (lambda x: torch.zeros(3, 3) + x, "same device"),
    "a number of the GPU in a tensor of the CPU": (lambda x: torch.zeros(3) * x.sum(), "same device"),
    "joined": (lambda x: torch.cat([x, torch.zeros(1, 3)]), "same device"),
    "rows picked by positions of the CPU": (lambda x: x.gather(0, torch.zeros(1, 3).long()), "same device"),
    "an embedding": (lambda x: nn.functional.embedding(torch.tensor([0]), x), "same device"),
    "a product": (lambda x: x @ torch.eye(3), "same device"),
    "positions of the GPU into the CPU's": (lambda x: torch.zeros(3)[x[0].long()], "indices should be"),
    "values of the CPU": (lambda x: x.index_put((x[0].long(),), torch.zeros(3)), "Expected self"),
    "in place into the CPU's": (lambda x: torch.zeros(3, 3).add_(x), "same device"),
    "two GPUs": (lambda x: x + torch.zeros(3, device="cuda:1"), "same device"),
    "two numbers of the CPU": (lambda x: x.addcmul(torch.tensor(1.0), torch.tensor(0.0)), "same device"),
    "a generator of the CPU": (lambda x: x.normal_(generator=torch.Generator()), "for generator"),
    "a generator of the GPU": (lambda x: torch.rand(3, generator=torch.Generator(THERE)), "for generator"),
    "numpy": (lambda x: x.numpy(), "can't convert cuda:0"),
    "numpy, unseen": (lambda x: np.asarray(x), "can't convert cuda:0"),
    "page-locked memory on a GPU": (lambda x: x.pin_memory(), "cannot pin"),
    "flash attention in float32": (lambda x: flash(*[x[None, None]] * 3), "fp16 and bf16"),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_of_placement_raises_as_on_a_gpu(fault, gpus):
    work, words = FAULTS[fault]
    with pytest.raises((RuntimeError, TypeError), match=words):
        work(torch.randn(3, 3, device=THERE).abs())


def test_what_cuda_allows_is_allowed_and_lies_where_cuda_puts_it(gpus):
    x = torch.arange(6.0, device=THERE).view(2, 3)
    assert (x.device, x.is_cuda, x.get_device()) == (torch.device("cuda", 0), True, 0)
    on_gpu = [
        x + torch.tensor(1.0), x[torch.tensor([1])], x[:, torch.tensor([True, False, True])], x.new_zeros(2),
        torch.tensor([x[0, 1], 2.0], device=THERE), torch.zeros_like(x), torch.tensor([3]).cuda(), x.T @ x,
        torch.where(x > 1, x, torch.tensor(0.0)), torch.where(x > 1, torch.tensor(1.0), torch.tensor(0.0)),
        torch.randn(2, device=THERE, generator=torch.Generator(THERE)),
        nn.functional.one_hot(x.long()), x.to("cuda:1").to("cuda:0"), torch.as_tensor(x), x.new_tensor([1]),
    ]  # fmt: skip
    assert {t.device for t in on_gpu} == {x.device}
    x[0, torch.tensor([0])] = torch.tensor(7.0)
    assert (x.tolist(), x[1, 2].item(), int(x.sum())) == ([[7, 1, 2], [3, 4, 5]], 5.0, 22)
    assert {t.device.type for t in (x.cpu(), x.to(HERE), torch.empty_like(x, device=HERE))} == {HERE}
    assert x.to(THERE) is x
    assert x.to(torch.device(THERE), torch.float32) is x
    assert torch.empty_like(x, device="meta").device.type == "meta"
    with torch.cuda.device(1), torch.device(THERE):
        assert torch.zeros(1).device == torch.device("cuda", 1)
    with torch.inference_mode():
        assert (x.detach()[0].tolist(), x.is_inference(), (x + 1)[0].is_inference()) == (
            [7, 1, 2],
            False,
            True,
        )
    seen = []
    thread = threading.Thread(target=lambda: seen.append(torch.zeros(1, device=THERE).device))
    thread.start()
    thread.join()
    assert seen == [x.device]


def test_copies_that_do_not_wait_bring_garbage_until_their_device_is_waited_for(gpus):
    x = torch.ones(3, device="cuda:1")
    ways = (
        lambda: x.to(HERE, non_blocking=True),
        lambda: torch.empty(3, pin_memory=True).copy_(x, non_blocking=True),
    )
    for way in ways:
        copied = way()
        assert copied.isnan().all()
        torch.cuda.synchronize()  # of the current device, which is another
        assert copied.isnan().all()
        torch.cuda.synchronize(x.device)
        assert copied.tolist() == [1, 1, 1]
    assert torch.zeros(3).copy_(x, non_blocking=True).tolist() == [1, 1, 1]  # ordinary memory
    pinned = torch.zeros(3).pin_memory()
    pinned.to(THERE, non_blocking=True)
    pinned += 1
    with pytest.raises(RuntimeError, match="was written while its copy"):
        torch.cuda.synchronize()


def test_modules_move_in_place_and_stay_tied(gpu):
    first, second = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)
    second.weight = own = first.weight
    both = nn.Sequential(first, nn.LayerNorm(4), second).to(THERE)
    assert first.weight is second.weight is own
    assert {(p.device.type, isinstance(p, nn.Parameter), p.requires_grad) for p in both.parameters()} == {
        (THERE, True, True)
    }
    other = copy.deepcopy(both)
    assert other[0].weight is other[2].weight is not own
    assert own.grad is None
    assert {p.device.type for p in both.to(HERE).parameters()} == {HERE}


@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_gradients_and_optimizers_compute_what_the_cpu_does(name, gpu):
    found = {}
    for place in (HERE, THERE):
        torch.manual_seed(0)
        module = nn.Sequential(nn.Linear(4, 8), nn.SiLU(), nn.Linear(8, 3)).to(place)
        optimizers = Optimizers(module, OptimRecipe(name=name, lr=0.1, clip_norm=0.1))
        for _ in range(3):
            outputs = module(torch.arange(8.0, device=place).view(2, 4))
            nn.functional.cross_entropy(outputs, torch.tensor([0, 2], device=place)).backward()
            optimizers.clip()
            optimizers.step(1.0)
            optimizers.zero()
        found[place] = [p.detach().cpu() for p in module.parameters()]
        assert {value.device.type for value in optimizers.state().values()} == {place}
    assert all(torch.allclose(a, b, atol=1e-6) for a, b in zip(found[HERE], found[THERE], strict=True))


def test_autocast_casts_by_cudas_lists(gpu):
    x, w = torch.randn(2, 4, device=THERE), torch.randn(4, 4, device=THERE, requires_grad=True)
    with torch.autocast(THERE, torch.bfloat16):
        y = x @ w
        found = [
            y,
            y.softmax(-1),
            y.sum(),
            y.exp(),
            y + y,
            torch.addcmul(x, y, y),
            nn.functional.linear(x, w),
        ]
        with torch.autocast(THERE, enabled=False):
            found.append(x @ w)
    half, full = torch.bfloat16, torch.float32
    assert [t.dtype for t in found] == [half, full, full, full, half, full, half, full]
    y.float().sum().backward()
    assert w.grad.dtype == full
    assert (x @ w).dtype == full


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_the_heads_attention_finds_the_kernels_right(dtype, gpu):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert fused_cuda.takes(torch.zeros(5, 4, 16, device=THERE, dtype=dtype))


def test_the_heads_attention_leaves_kernels_aside_that_want_their_sums_otherwise(gpu, monkeypatch):
    monkeypatch.setattr(kernels, "_ALIGNED", 128)
    with pytest.warns(UserWarning, match="they refuse: log-sum-exp in multiples"):
        assert not fused_cuda.takes(torch.zeros(5, 4, 16, device=THERE))
