"""Time and memory of preparing, planning and reading more and more conversations.

    python scripts/bench_scale.py [--sizes 1000,10000,100000] [--num-proc 1] [--json]

Conversations are synthetic (one to four exchanges, about 400 tokens), the tokenizer a tiny one trained on
them; no model is loaded. Each size runs in a process of its own, so that its peak memory is its own: the
resident size of that process, less what it had before it began. Prints seconds, tokens and MiB, and per
1,000 conversations: where those stay level, growth is linear.
"""

from __future__ import annotations

import argparse
import json
import random
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

_SYLLABLES = ("ba", "ce", "di", "fo", "gu", "ka", "le", "mi", "no", "pu")
_WORDS = [one + other for one in _SYLLABLES for other in _SYLLABLES]
_CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] "
    "+ '<|im_end|>\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def conversations(count: int) -> Iterator[dict[str, Any]]:
    """Yield `count` conversations of random words, the same for the same count."""
    draw = random.Random(0)
    for number in range(count):
        messages = []
        for _ in range(draw.randint(1, 4)):
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


def measure(size: int, num_proc: int) -> dict[str, Any]:
    """Prepare, plan and read `size` conversations in this process; return what it took."""
    from eagle_train.data.prepare import prepare
    from eagle_train.data.rows import open_rows
    from eagle_train.shards.plan import RowTable, make_batches

    seconds: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        save_tokenizer(folder / "tokenizer")
        with open(folder / "chats.jsonl", "w", encoding="utf-8") as file:
            for record in conversations(size):
                file.write(json.dumps(record) + "\n")
        warm_up = folder / "one.jsonl"
        warm_up.write_text(json.dumps(next(conversations(1))))
        prepare([str(warm_up)], str(folder / "tokenizer"), folder / "one", num_proc=1, show=False)
        before = _peak_mib()
        begun = time.perf_counter()
        made = prepare(
            [str(folder / "chats.jsonl")],
            str(folder / "tokenizer"),
            folder / "rows",
            num_proc=num_proc,
            show=False,
        )
        seconds["prepare"] = time.perf_counter() - begun
        prepared = _peak_mib()
        begun = time.perf_counter()
        rows = open_rows(folder / "rows")
        table = RowTable.of(rows.dataset)
        batches = make_batches(table.lengths, 4096)
        seconds["plan"] = time.perf_counter() - begun
        begun = time.perf_counter()
        read = sum(len(rows.dataset[number]["input_ids"]) for batch in batches for number in batch)
        seconds["read"] = time.perf_counter() - begun
    assert read == made["tokens"]
    return {
        "conversations": size,
        "tokens": made["tokens"],
        "batches": len(batches),
        "seconds": seconds,
        "prepare_mib": prepared - before,
        "all_mib": _peak_mib() - before,
    }


def _peak_mib() -> float:
    unit = 1 if sys.platform == "darwin" else 1024  # bytes there, KiB elsewhere
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**20


def main() -> None:
    """Measure every size and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--sizes", default="1000,10000,100000")
    parser.add_argument("--num-proc", type=int, default=1)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--one", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one is not None:
        print(json.dumps(measure(options.one, options.num_proc)))
        return
    figures = []
    for size in options.sizes.split(","):
        command = [sys.executable, __file__, "--one", size, "--num-proc", str(options.num_proc)]
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
    memory = f"{made['prepare_mib']:.0f} MiB to prepare, {made['all_mib']:.0f} MiB in all"
    head = f"{made['conversations']:,} conversations, {made['tokens']:,} tokens"
    return f"{head}: {', '.join(parts)}; {memory} ({made['all_mib'] / thousands:.1f} MiB)"


if __name__ == "__main__":
    main()
