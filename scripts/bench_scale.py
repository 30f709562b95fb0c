"""Time and memory of preparing, planning, writing and reading more and more conversations.

    python scripts/bench_scale.py [--sizes 1000,10000,100000] [--exchanges 4] [--num-proc 1] [--json]

Conversations are synthetic (one to four exchanges of about 165 tokens), the tokenizer a tiny one trained on
them. The target is a stand-in of hidden size 8 whose states are zeros: no model runs, but shards are planned,
written and read as with any other, row by row in the order of training, packed, one epoch. Each size runs in
a process of its own, so that its memory is its own: the peak of preparing, and what the process holds beside
the mapped shards once all is read, less what it had before it began. Prints processor seconds, which other
work on the machine does not move, tokens and MiB, and per 1,000 conversations: where those stay level, growth
is linear.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import resource
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

_SYLLABLES = ("ba", "ce", "di", "fo", "gu", "ka", "le", "mi", "no", "pu")
_WORDS = [one + other for one in _SYLLABLES for other in _SYLLABLES]
_CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] "
    "+ '<|im_end|>\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def conversations(count: int, exchanges: int = 4) -> Iterator[dict[str, Any]]:
    """Yield `count` conversations of random words, the same for the same numbers."""
    draw = random.Random(0)
    for number in range(count):
        messages = []
        for _ in range(draw.randint(1, exchanges)):
            for role, longest in (("user", 60), ("assistant", 180)):
                words = draw.choices(_WORDS, k=draw.randint(longest // 6, longest))
                messages.append({"role": role, "content": " ".join(words) + "."})
        yield {"id": number, "messages": messages}


def save_tokenizer(folder: Path) -> None:
    """Train a byte-level tokenizer of 1,000 ids and save it with a chat template."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=1000,
        special_tokens=["<|im_start|>", "<|im_end|>"],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    backend.train_from_iterator([" ".join(_WORDS)] * 3, trainer)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|im_end|>")
    tokenizer.chat_template = _CHATML
    tokenizer.save_pretrained(folder)


def write_shards(dataset: Any, table: Any, plan: Any, folder: Path) -> None:
    """Fill the planned shards with states of zeros and close the directory, as extraction does."""
    import torch

    from eagle_train.shards.frozen_target import FrozenTarget
    from eagle_train.shards.manifest import close_directory
    from eagle_train.shards.writer import ShardBuffer

    hidden, layers = plan.setting.hidden_size, len(plan.setting.layer_ids)
    num_labels = table.num_labels
    for number, shard in enumerate(plan.shards):
        buffer = ShardBuffer(plan, number, table)
        for rows in shard.batches:
            ids = torch.cat([torch.tensor(dataset[row]["input_ids"], dtype=torch.int32) for row in rows])
            tokens, labels = len(ids), int(num_labels[list(rows)].sum())
            aux, last = torch.zeros(tokens, layers * hidden), torch.zeros(labels, hidden)
            buffer.put(ids, aux, last, torch.zeros(labels), torch.zeros(labels), torch.zeros(tokens))
        buffer.finish(folder, 0)
    weight = torch.zeros(plan.setting.vocab_size, hidden)
    FrozenTarget(weight, weight, target=plan.setting.target).save(folder)
    plan.create(folder)
    close_directory(folder, plan)


def setting_of(table: Any) -> Any:
    """Return the setting of an extraction from a target of hidden size 8."""
    from eagle_train.shards.plan import default_shard_tokens
    from eagle_train.shards.schema import Setting

    return Setting(
        rows_fingerprint=table.fingerprint(),
        tokenizer_fingerprint="none",
        target={"name": "zeros", "revision": None, "fingerprint": "zeros", "dtype": "bf16"},
        features="eagle3",
        layer_ids=(2, 4, 5),
        codec="bf16",
        hidden_size=8,
        vocab_size=1000,
        num_layers=8,
        device="cpu",
        threads=1,
        batch_tokens=4096,
        shard_tokens=default_shard_tokens(int(table.lengths.sum()), 4096),
    )


def measure(size: int, num_proc: int, exchanges: int) -> dict[str, Any]:
    """Prepare, plan, write and read `size` conversations in this process; return what it took."""
    from eagle_train.data.prepare import prepare
    from eagle_train.data.rows import open_rows
    from eagle_train.shards.plan import RowTable, make_plan
    from eagle_train.shards.reader import open_shards
    from eagle_train.shards.sampler import Plan as Order
    from eagle_train.training.loader import Loader

    seconds: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        save_tokenizer(folder / "tokenizer")
        with open(folder / "chats.jsonl", "w", encoding="utf-8") as file:
            for record in conversations(size, exchanges):
                file.write(json.dumps(record) + "\n")
        warm_up = folder / "one.jsonl"
        warm_up.write_text(json.dumps(next(conversations(1))))
        prepare([str(warm_up)], str(folder / "tokenizer"), folder / "one", num_proc=1, show=False)
        before, held = _peak_mib(), _own_mib()
        begun = _seconds()
        made = prepare(
            [str(folder / "chats.jsonl")],
            str(folder / "tokenizer"),
            folder / "rows",
            num_proc=num_proc,
            show=False,
        )
        seconds["prepare"] = _seconds() - begun
        prepared = _peak_mib()
        begun = _seconds()
        rows = open_rows(folder / "rows")
        table = RowTable.of(rows.dataset)
        plan = make_plan(table, setting_of(table))
        seconds["plan"] = _seconds() - begun
        begun = _seconds()
        write_shards(rows.dataset, table, plan, folder / "shards")
        seconds["write"] = _seconds() - begun
        begun = _seconds()
        shards = open_shards(folder / "shards")
        lengths = tuple(int(length) for length in shards.lengths)
        order = Order(tuple(range(len(lengths))), lengths, 0, 16_384)
        windows = itertools.islice(order.windows(), len(order.epoch(0)))
        read = sum(micro.batch.num_tokens for micro in Loader(shards, "eagle3", 3, 4096).training(windows))
        seconds["iterate"] = _seconds() - begun
        at_the_end = _own_mib() - held
    assert read == made["tokens"]
    return {
        "conversations": size,
        "tokens": made["tokens"],
        "shards": len(plan.shards),
        "seconds": seconds,
        "prepare_mib": prepared - before,
        "all_mib": at_the_end,
    }


def _seconds() -> float:
    """Processor seconds of this process and of the workers that it has waited for."""
    return sum(os.times()[:4])


def _peak_mib() -> float:
    unit = 1 if sys.platform == "darwin" else 1024  # bytes there, KiB elsewhere
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**20


def _own_mib() -> float:
    """Memory of this process now without the files that it maps, which go when others need the room."""
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return _peak_mib()
    return sum(int(line.split()[1]) for line in lines if line.startswith("RssAnon:")) / 1024


def main() -> None:
    """Measure every size and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--sizes", default="1000,10000,100000")
    parser.add_argument("--exchanges", type=int, default=4, help="at most so many in a conversation")
    parser.add_argument("--num-proc", type=int, default=1)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--one", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one is not None:
        print(json.dumps(measure(options.one, options.num_proc, options.exchanges)))
        return
    figures = []
    for size in options.sizes.split(","):
        command = [sys.executable, __file__, "--one", size, "--num-proc", str(options.num_proc)]
        command += ["--exchanges", str(options.exchanges)]
        ran = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
        figures.append(json.loads(ran.stdout.splitlines()[-1]))
        if not options.json:
            print(_line(figures[-1]), flush=True)
    if options.json:
        print(json.dumps(figures))


def _line(made: dict[str, Any]) -> str:
    thousands = made["conversations"] / 1000
    parts = [
        f"{stage} {taken:.1f} s ({1000 * taken / thousands:.0f} ms)"
        for stage, taken in made["seconds"].items()
    ]
    memory = f"{made['prepare_mib']:.0f} MiB to prepare, {made['all_mib']:.0f} MiB held at the end"
    head = f"{made['conversations']:,} conversations, {made['tokens']:,} tokens"
    return f"{head}: {', '.join(parts)}; {memory} ({made['all_mib'] / thousands:.1f} MiB)"


if __name__ == "__main__":
    main()
