"""Tokens per second, peak memory and the share of the matrix rate of one training step, beside a naive twin.

    python scripts/bench_train.py [--seconds 120] [--threads 1] [--cases 512,8192,1.0,fp32 ...] [--json]
    python scripts/bench_train.py --growth [--json]

A case is length, draft vocabulary, share of rows counted, precision: one document of that length, forward,
backward and AdamW, at the sizes of SmolLM2-135M unless --sizes says otherwise. "naive" does what
public trainers do: every row at every step, a dense mask, whole logits kept for the backward. Each case has a
process of its own, so that its peak memory is its own; on one thread the time is the processor's, so that
other work on the machine does not matter. The matrix rate is that of plain products of the step's shapes,
measured in the same process; the arithmetic counted is that of counted rows alone (a row's own
projections, its keys, its logits, the target's logits once), three times forward for forward and backward.

--growth takes a single step at each of several lengths, to see how memory and time grow: memory by the bytes
that each token more takes, time by the share of the matrix rate, which stays where it grows like the work.
"""

from __future__ import annotations

import argparse
import itertools
import json
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from training_case import DTYPES, Case, Naive, Sizes, arithmetic, build

from eagle_train.training.eagle3_step import Eagle3Step

CASES = [
    "512,8192,1.0,fp32",
    "512,8192,1.0,bf16",
    "512,8192,0.4,bf16",
    "2048,8192,0.4,bf16",
    "4096,8192,0.4,bf16",
    "16384,8192,0.4,bf16",
    "512,32000,1.0,bf16",
]
GROWTH = [f"{length},8192,0.4,bf16" for length in (512, 2048, 8192, 16384)]
NAIVE_UP_TO = 512  # tokens; longer ones would take most of the time


def best_time(work: Callable[[], Any], seconds: float, clock: Callable[[], float], device: str) -> float:
    """Return the shortest time of `work` over repeats that fill `seconds`, after one to warm up.

    Without any seconds: the time of the first.
    """
    if seconds > 0:
        work()
    found, begun = float("inf"), time.monotonic()
    while found == float("inf") or time.monotonic() - begun < seconds:
        _wait(device)
        started = clock()
        work()
        _wait(device)
        found = min(found, clock() - started)
    return found


def _wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def matrix_rate(case: Case, sizes: Sizes, clock: Callable[[], float], device: str) -> float:
    """Return operations per second of products of the step's shapes, weighted as the step has them."""
    dtype, rows = DTYPES[case.dtype], min(case.length, 2048)
    spent = operations = 0.0
    for width, out in ((sizes.hidden, case.draft_vocab), (sizes.hidden, 2 * sizes.intermediate)):
        left = torch.randn(rows, width, device=device).to(dtype)
        right = torch.randn(out, width, device=device).to(dtype)
        spent += best_time(lambda x=left, y=right: x @ y.T, 0.3, clock, device)  # type: ignore[misc]
        operations += 2 * rows * width * out
    return operations / spent


def measure(case: Case, sizes: Sizes, naive: bool, seconds: float, device: str = "cpu") -> dict[str, float]:
    """Return tokens_per_second, peak_gib and share_of_matrix_rate of one case in this process."""
    one_thread = device == "cpu" and torch.get_num_threads() == 1
    clock = time.process_time if one_thread else time.perf_counter
    rate = matrix_rate(case, sizes, clock, device)
    head, frozen, batch, counts = build(case, sizes, device)
    optimizer = torch.optim.AdamW(head.parameters(), lr=1e-5, fused=True)
    step: nn.Module
    step = Naive(head, frozen, sizes.steps) if naive else Eagle3Step(head, frozen, num_steps=sizes.steps)

    def train() -> None:
        with torch.autocast(device, dtype=torch.bfloat16, enabled=case.dtype == "bf16"):
            result = step(batch, counts)
        (result if naive else result.loss).backward()
        optimizer.step()
        optimizer.zero_grad()

    for parameter in head.parameters():  # so that the optimizer's state is there from the first step
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    optimizer.zero_grad()
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    spent = best_time(train, seconds, clock, device)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    if device == "cuda":
        peak = torch.cuda.max_memory_allocated() / 2**30
    return {
        "tokens_per_second": case.length / spent,
        "peak_gib": peak,
        "share_of_matrix_rate": arithmetic(case, sizes) / spent / rate,
        "matrix_gflops": rate / 1e9,
    }


def _apart(text: str, naive: bool, given: argparse.Namespace) -> dict[str, float]:
    """Measure one case in a process of its own."""
    words = [sys.executable, __file__, "--cases", text, "--threads", str(given.threads), "--alone"]
    words += ["--repeat-seconds", str(given.repeat_seconds), "--sizes", *map(str, given.sizes)]
    done = subprocess.run([*words, *(["--naive"] if naive else [])], capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{text}: {done.stderr.strip().splitlines()[-1]}")
    return json.loads(done.stdout)


def growth(report: list[dict[str, Any]]) -> list[float]:
    """Return the KiB that a token more takes, from each case to the next longer one."""
    sizes = [(Case.of(found["case"]).length, found["peak_gib"] * 2**20) for found in report]
    return [(b - a) / (longer - shorter) for (shorter, a), (longer, b) in itertools.pairwise(sizes)]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=120, help="begin no case past this")
    parser.add_argument("--repeat-seconds", type=float, default=1.0)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--cases", nargs="+", default=CASES)
    parser.add_argument(
        "--sizes", nargs=7, type=int, default=list(vars(Sizes()).values()), help=Sizes.__doc__
    )
    parser.add_argument("--growth", action="store_true", help="one step at 512 to 16,384 tokens, ours alone")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--naive", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--alone", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.alone:
        torch.set_num_threads(given.threads)
        case, sizes = Case.of(given.cases[0]), Sizes(*given.sizes)
        print(json.dumps(measure(case, sizes, given.naive, given.repeat_seconds)))
        return
    if given.growth:
        given.cases, given.repeat_seconds, given.seconds = GROWTH, 0.0, float("inf")
    begun, report = time.monotonic(), list[dict[str, Any]]()
    if not given.json:
        print("length, vocabulary, counted, dtype       tokens/s  peak GiB  of matrix rate")
    for text in given.cases:
        for naive in (False, True):
            left_out = naive and (given.growth or Case.of(text).length > NAIVE_UP_TO)
            if left_out or time.monotonic() - begun > given.seconds:
                continue
            found = {"case": text, "naive": naive, **_apart(text, naive, given)}
            report.append(found)
            if not given.json:
                name = f"{text}{' naive' if naive else ''}"
                print(
                    f"{name:38} {found['tokens_per_second']:9,.0f} {found['peak_gib']:9.2f} "
                    f"{found['share_of_matrix_rate']:9.2f}   ({found['matrix_gflops']:.0f} Gflop/s)",
                    flush=True,
                )
    if given.json:
        print(json.dumps(report))
    elif given.growth:
        print(f"KiB for each token more: {', '.join(f'{size:.1f}' for size in growth(report))}")


if __name__ == "__main__":
    main()
