"""One command for a machine with a GPU, under eight minutes: is it right, and how fast is it?

    PYTHONPATH=. python scripts/gpu_check.py [--device cuda] [--small] [--minutes 8] [--json]

Needs torch, transformers, accelerate and safetensors. Checks the device against the CPU: features of a small
target, attention by its kernels, a training step's loss and gradients beside a naive twin, greedy speculative
decoding beside plain decoding. Then measures with random weights at the shapes of an 8B target (hidden 4,096,
draft vocabulary 32,000, 4,096 tokens, 60 % of rows counted): extraction, training and decoding rates, peak
memory, share of the matrix rate. Without a GPU, or with --small, the same runs at small shapes. Exits with 1
if a check fails. CUDA_VISIBLE_DEVICES chooses among several GPUs.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from bench_train import best_time, measure
from training_case import Case, Naive, Sizes, build

from eagle_train.decoding.drafters import HeadDrafter
from eagle_train.decoding.loop import Settings, generate, plain
from eagle_train.decoding.shapes import Chain, Dynamic
from eagle_train.heads import fused_cuda
from eagle_train.heads.config import HeadConfig
from eagle_train.heads.disk import build_head
from eagle_train.heads.fused import block_forward
from eagle_train.heads.plain_attention import plain_forward
from eagle_train.targets.capture import FeatureTap, default_layer_ids
from eagle_train.targets.labels import labels
from eagle_train.targets.load import Target
from eagle_train.training.eagle3_step import Eagle3Step

LARGE = Sizes(hidden=4096, intermediate=14336, heads=32, kv_heads=8, head_dim=128, vocab=128256, steps=7)
SMALL = Sizes(hidden=256, intermediate=512, heads=4, kv_heads=2, head_dim=64, vocab=4096, steps=7)
TINY = Sizes(hidden=64, intermediate=96, heads=4, kv_heads=2, head_dim=16, vocab=512, steps=4)
CLOSE = 2e-3  # of the largest entry: two devices sum in different orders
PROMPT = list(range(5, 69))


def random_target(sizes: Sizes, num_layers: int, dtype: torch.dtype, device: str) -> Target:
    """Return a Llama of random weights, made on the device."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=sizes.hidden,
        intermediate_size=sizes.intermediate,
        num_hidden_layers=num_layers,
        num_attention_heads=sizes.heads,
        num_key_value_heads=sizes.kv_heads,
        head_dim=sizes.head_dim,
        vocab_size=sizes.vocab,
        max_position_embeddings=8192,
        eos_token_id=None,
        bos_token_id=None,
    )
    torch.manual_seed(0)
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device(device):
            model = LlamaForCausalLM(config)
    finally:
        torch.set_default_dtype(before)
    return Target("random", None, model.eval())


def head_drafter(target: Target, shape: Any, draft_vocab: int) -> HeadDrafter:
    """Return a drafter with a random head for the target, in its dtype."""
    config = HeadConfig.for_target(target.config.to_dict(), "eagle3", draft_vocab_size=draft_vocab)
    torch.manual_seed(1)
    head = build_head(config, torch.arange(draft_vocab))
    return HeadDrafter(head.to(target.device, target.dtype), target, shape)


def difference(one: torch.Tensor, two: torch.Tensor) -> float:
    """Return the largest difference, relative to the largest entry."""
    return float((one.double().cpu() - two.double().cpu()).abs().max() / two.double().abs().max())


def check_features(device: str) -> dict[str, Any]:
    """Captured layers of one random target, on the CPU and on the device."""
    here = random_target(TINY, 8, torch.float32, "cpu")
    there = random_target(TINY, 8, torch.float32, "cpu")
    there.model.load_state_dict(here.model.state_dict())
    there.model.to(torch.device(device))  # type: ignore[arg-type]
    ids = torch.randint(TINY.vocab, (2, 50), generator=torch.Generator().manual_seed(2))
    found = []
    for target in (here, there):
        with FeatureTap(target, default_layer_ids(8)) as tap:
            captured = tap.forward(ids.to(target.device))
        assert captured.aux is not None
        found.append((captured.aux, captured.last))
    worst = max(difference(got, wanted) for wanted, got in zip(*found, strict=True))
    return {"check": "features, device and CPU", "difference": worst, "fine": worst < CLOSE}


def check_attention(device: str) -> dict[str, Any]:
    """Values of a block of attention on the device in 16 and 32 bits, plain operations beside them."""
    draw = torch.Generator().manual_seed(3)
    worst, kernels, fine = 0.0, [], True
    for dtype, close in ((torch.bfloat16, 2e-2), (torch.float32, CLOSE)):
        q, keys, values = (torch.randn(500, n, 128, generator=draw).to(device, dtype) for n in (8, 2, 2))
        out, _ = block_forward(q, keys, values, True, 0.1)
        found = difference(out, plain_forward(q.float(), keys.float(), values.float(), True, 0.1)[0])
        worst, fine = max(worst, found), fine and found < close
        kernels.append(device == "cpu" or fused_cuda.takes(q))
    return {"check": "attention", "by kernels (16, 32 bits)": kernels, "difference": worst, "fine": fine}


def check_step(device: str) -> dict[str, Any]:
    """Loss and gradients of a training step on the device, beside the naive twin on the CPU."""
    case = Case(200, 256, 0.6, "fp32")
    head, frozen, batch, counts = build(case, TINY, device)
    loss = Eagle3Step(head, frozen, num_steps=TINY.steps)(batch, counts).loss
    loss.backward()
    twin, frozen, batch, counts = build(case, TINY, "cpu")
    wanted = Naive(twin, frozen, TINY.steps)(batch, counts)
    wanted.backward()
    worst = difference(loss.detach(), wanted.detach())
    for got, of in zip(head.parameters(), twin.parameters(), strict=True):
        assert got.grad is not None
        assert of.grad is not None
        worst = max(worst, difference(got.grad, of.grad))
    return {"check": "a step on the device, its twin on the CPU", "difference": worst, "fine": worst < CLOSE}


def check_decoding(device: str) -> dict[str, Any]:
    """Greedy ids with a chain and a tree, beside plain decoding, in float32."""
    target = random_target(TINY, 8, torch.float32, device)
    settings = Settings(max_new_tokens=48, eos_ids=())
    wanted = plain(target, PROMPT, settings).ids
    same = True
    for shape in (Chain(4), Dynamic(total_tokens=20, top_k=4, depth=4)):
        same &= generate(target, head_drafter(target, shape, 256), PROMPT, settings).ids == wanted
    return {"check": "greedy ids with and without a head", "difference": float(not same), "fine": same}


CHECKS = (check_features, check_attention, check_step, check_decoding)


def extraction(target: Target, tokens: int, device: str, seconds: float) -> dict[str, Any]:
    """The tapped forward of one row and the labels of 60 % of its positions."""
    ids = torch.randint(target.vocab_size, (1, tokens), device=target.device)
    with FeatureTap(target, default_layer_ids(target.num_layers)) as tap, torch.no_grad():

        def work() -> None:
            captured = tap.forward(ids)
            labels(target, captured.last[0, -int(0.6 * tokens) :])

        spent = best_time(work, seconds, time.perf_counter, device)
    return {"tokens_per_second": tokens / spent}


def decoding(target: Target, draft_vocab: int, tokens: int) -> dict[str, Any]:
    """Plain decoding, and the cost of a round with a chain of 3 and a tree of 60 (the head is random)."""
    settings = Settings(max_new_tokens=tokens, eos_ids=())
    plain(target, PROMPT, settings)  # warm
    made = plain(target, PROMPT, settings)
    rate = (len(made.ids) - 1) / made.decode_seconds
    found: dict[str, Any] = {"plain_tokens_per_second": rate}
    shapes = {"chain of 3": Chain(3), "tree of 60": Dynamic(total_tokens=60, top_k=10, depth=6)}
    for name, shape in shapes.items():
        drafter = head_drafter(target, shape, draft_vocab)
        generate(target, drafter, PROMPT, Settings(max_new_tokens=4, eos_ids=()))
        made = generate(target, drafter, PROMPT, settings)
        found[f"plain tokens a round costs, {name}"] = rate * made.decode_seconds / len(made.accepted)
    return found


def peak_gib(device: str) -> float:
    """Return the device's peak memory since the last call, 0 on a CPU."""
    if device == "cpu":
        return 0.0
    peak = torch.cuda.max_memory_allocated() / 2**30
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    return peak


def measured(device: str, seconds: float, large: bool) -> list[Callable[[], dict[str, Any]]]:
    """Return what to measure, in order."""
    sizes, layers = (LARGE, 32) if large else (SMALL, 8)
    length, draft_vocab = (4096, 32000) if large else (256, 1024)
    dtype = torch.float32 if device == "cpu" else torch.bfloat16

    def of_target() -> dict[str, Any]:
        target = random_target(sizes, layers, dtype, device)
        found = extraction(target, length, device, seconds)
        found |= decoding(target, draft_vocab, 64 if large else 12)
        return {**found, "measured": "extraction and decoding", "peak_gib": peak_gib(device)}

    def of_training(share: float) -> dict[str, Any]:
        case = Case(length, draft_vocab, share, "fp32" if device == "cpu" else "bf16")
        found = measure(case, sizes, naive=False, seconds=seconds, device=device)
        return {"measured": f"training, {share:.0%} of rows counted", **dataclasses.asdict(case), **found}

    return [of_target, lambda: of_training(0.6), lambda: of_training(1.0)]


def _short(value: Any) -> str:
    return f"{value:,.4g}" if isinstance(value, float) else str(value)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--device", choices=("cuda", "cpu"), default="cuda" if torch.cuda.is_available() else "cpu"
    )
    parser.add_argument("--small", action="store_true", help="measure at small shapes, as without a GPU")
    parser.add_argument("--minutes", type=float, default=8.0, help="begin nothing past nine tenths of this")
    parser.add_argument("--seconds", type=float, default=10.0, help="of repeats of each measurement")
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    if given.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: torch sees no GPU here")
    begun, report = time.monotonic(), []
    device = torch.cuda.get_device_name() if given.device != "cpu" else "CPU"
    if not given.json:
        print(f"{device}, torch {torch.__version__}")
    large = given.device == "cuda" and not given.small
    checks = [lambda c=c: c(given.device) for c in CHECKS]  # type: ignore[misc]
    for work in [*checks, *measured(given.device, given.seconds, large)]:
        if time.monotonic() - begun > 54 * given.minutes:
            print("out of time: the rest is left out", file=sys.stderr)
            break
        found = work()
        report.append(found)
        if not given.json:
            print("  ".join(f"{name}: {_short(value)}" for name, value in found.items()))
    if given.json:
        print(json.dumps({"device": device, "torch": torch.__version__, "report": report}))
    return 0 if all(found.get("fine", True) for found in report) else 1


if __name__ == "__main__":
    sys.exit(main())
