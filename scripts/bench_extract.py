"""Extraction beside the target's own forward, on the same batches, in one run.

    python scripts/bench_extract.py ROWS TARGET [--dtype bf16] [--codec fp8] [--tokens 16384]

"Own forward" runs the target's body on each padded batch and its lm_head on the label positions in the
same pieces: nothing is kept. "Extract" is what `eagle extract` does with the batch: tap, label, encode,
put into the shard, hash and write it, here without the overlap that a real run has. After a batch that
warms both up they are timed in turns, batch by batch, each first every other time. Prints tokens per
second of each and their ratios, of wall time and of processor time: on a machine that does other work
too, only the latter means something. --json for machines.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from eagle_train.shards.writer import ShardBuffer
from eagle_train.targets.batch import RowBatch, load_batch, run_batch, store_batch
from eagle_train.targets.capture import FeatureTap
from eagle_train.targets.labels import rows_at_once
from eagle_train.targets.load import Target, load_target
from eagle_train.targets.survey import Survey, survey


class Clock:
    """Adds up wall time and processor time of the pieces of one kind of work."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.wall = self.processor = 0.0

    def _wait_for_device(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def __enter__(self) -> None:
        self._wait_for_device()
        self._begun = time.perf_counter(), time.process_time()

    def __exit__(self, *error: object) -> None:
        self._wait_for_device()
        self.wall += time.perf_counter() - self._begun[0]
        self.processor += time.process_time() - self._begun[1]


def own_forward(target: Target, batch: RowBatch) -> None:
    """The target's body on the batch, its lm_head on the label positions."""
    with torch.no_grad():
        last = target.run_body(batch.padded)
        labels = last.flatten(0, 1)[batch.real][batch.label_at]
        for piece in labels.split(rows_at_once(target, labels.device)):
            target.logits(piece)


def measure(work: Survey, target: Target, folder: Path, most_tokens: int) -> dict[str, float]:
    """Time both on the plan's shards, one after the other, until `most_tokens` tokens are done."""
    plan, tokens = work.plan, 0
    own, extraction = Clock(target.device), Clock(target.device)

    def load(rows: Sequence[int]) -> RowBatch:
        return load_batch(work.dataset, work.table, rows, target.vocab_size, target.device)

    def keep(rows: Sequence[int], buffer: ShardBuffer) -> None:
        batch = load(rows)
        store_batch(tap, batch, run_batch(tap, batch), buffer, plan.setting)

    with FeatureTap(target, plan.setting.layer_ids) as tap:
        first = plan.shards[0].batches[0]
        own_forward(target, load(first))
        keep(first, ShardBuffer(plan, 0, work.table))
        turn = 0
        for number, shard in enumerate(plan.shards):
            with extraction:
                buffer = ShardBuffer(plan, number, work.table)
            for rows in shard.batches:
                batch = load(rows)
                for kind in (own, extraction) if turn % 2 else (extraction, own):
                    with kind:
                        own_forward(target, batch) if kind is own else keep(rows, buffer)
                turn += 1
                tokens += len(batch.real)
            with extraction:
                buffer.finish(folder, most_bad=0)
            if tokens >= most_tokens:
                break
    return {
        "tokens": tokens,
        "own_tokens_per_second": tokens / own.wall,
        "extract_tokens_per_second": tokens / extraction.wall,
        "ratio": own.wall / extraction.wall,
        "ratio_of_processor_time": own.processor / extraction.processor,
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("rows")
    parser.add_argument("target")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--for", dest="features", default="eagle3")
    parser.add_argument("--codec", default="bf16")
    parser.add_argument("--tokens", type=int, default=16_384)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        work = survey(
            given.rows,
            given.target,
            folder,
            features=given.features,
            codec=given.codec,
            dtype=given.dtype,
            threads=given.threads,
        )
        torch.set_num_threads(given.threads)
        target = load_target(given.target, dtype=work.dtype, device=work.device)
        figures = measure(work, target, Path(folder), given.tokens)
    if given.json:
        print(json.dumps(figures))
        return
    print(
        f"{figures['tokens']:,} tokens, {work.plan.setting.target['dtype']}, {given.threads} thread(s): "
        f"own forward {figures['own_tokens_per_second']:,.0f} tokens/s, "
        f"extraction {figures['extract_tokens_per_second']:,.0f} tokens/s, ratio {figures['ratio']:.3f}, "
        f"of processor time {figures['ratio_of_processor_time']:.3f}"
    )


if __name__ == "__main__":
    main()
