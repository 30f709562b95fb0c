"""Make the conversations that the package ships: our prompts, answered greedily by the small target.

    python scripts/make_conversations.py --out eagle_train/data/builtin/conversations.jsonl.gz

Prompts come from ``scripts/prompts.jsonl``; answers from the built-in target in fp32, batched for speed
and then checked one by one: every answer token must be the argmax of an unpadded forward over its own
prefix, and an answer ends (marked unfinished) before the first token whose two best logits are closer
than MIN_GAP, so that no change in the order of summation can turn the text into something else.
Output is the Answers record: messages, ``answer_ids`` and ``finished`` beside each answer.
"""

from __future__ import annotations

import argparse
import gzip
import io
import json
import sys
import time
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from eagle_train.io import write_bytes
from eagle_train.provenance import tokenizer_fingerprint
from eagle_train.targets.builtin import NAME, small_target

MIN_GAP = 1e-4


@torch.inference_mode()
def answer_batch(model: Any, prompts: list[list[int]], limit: int, end: int) -> list[list[int]]:
    """Greedy answers of at most `limit` tokens to left-padded prompts; the end-of-turn token is kept."""
    width = max(map(len, prompts))
    ids = torch.tensor([[end] * (width - len(p)) + p for p in prompts])
    mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts])
    made = model.generate(
        input_ids=ids, attention_mask=mask, max_new_tokens=limit, do_sample=False, pad_token_id=end
    )[:, width:].tolist()
    return [row[: row.index(end) + 1] if end in row else row for row in made]


@torch.inference_mode()
def robust_greedy_length(model: Any, prompt: list[int], answer: list[int]) -> tuple[int, float]:
    """Return how many leading answer tokens are greedy beyond doubt, and the smallest gap among them."""
    logits = model(torch.tensor([prompt + answer])).logits[0, len(prompt) - 1 : -1].float()
    top = logits.topk(2)
    gap = top.values[:, 0] - top.values[:, 1]
    good = (top.indices[:, 0] == torch.tensor(answer)) & (gap >= MIN_GAP)
    kept = int(good.long().cumprod(0).sum())
    return kept, float(gap[:kept].min()) if kept else 0.0


def answer_turn(
    model: Any, tokenizer: Any, chats: list[dict[str, Any]], turn: int, limit: int, batch: int
) -> float:
    """Answer user turn `turn` of every chat that has one, in place. Returns the smallest gap seen."""
    end = tokenizer.eos_token_id
    jobs = []
    for chat in chats:
        if turn < len(chat["turns"]):
            chat["messages"].append({"role": "user", "content": chat["turns"][turn]})
            text = tokenizer.apply_chat_template(chat["messages"], tokenize=False, add_generation_prompt=True)
            jobs.append((tokenizer(text, add_special_tokens=False).input_ids, chat))
    jobs.sort(key=lambda job: len(job[0]))
    smallest = float("inf")
    for first in range(0, len(jobs), batch):
        part, started = jobs[first : first + batch], time.time()
        answers = answer_batch(model, [prompt for prompt, _ in part], limit, end)
        for (prompt, chat), answer in zip(part, answers, strict=True):
            kept, gap = robust_greedy_length(model, prompt, answer)
            smallest = min(smallest, gap)
            ids = answer[:kept]
            finished = bool(ids) and ids[-1] == end
            content = tokenizer.decode(ids[:-1] if finished else ids)
            chat["messages"].append(
                {"role": "assistant", "content": content, "answer_ids": ids, "finished": finished}
            )
            if kept < len(answer):
                print(f"{chat['id']}: {kept} of {len(answer)} tokens kept", file=sys.stderr)
        count = sum(map(len, answers))
        print(
            f"turn {turn + 1}: {first + len(part)}/{len(jobs)} answers, "
            f"{count / (time.time() - started):.0f} tokens/s",
            file=sys.stderr,
            flush=True,
        )
    return smallest


def main() -> None:
    """Answer all prompts and write the compressed records."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--prompts", type=Path, default=Path(__file__).with_name("prompts.jsonl"))
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--max-new-tokens", type=int, default=300)
    parser.add_argument("--batch", type=int, default=24)
    options = parser.parse_args()
    model_dir = small_target()
    tokenizer = AutoTokenizer.from_pretrained(model_dir)
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32).eval()
    lines = options.prompts.read_text(encoding="utf-8").splitlines()
    chats: list[dict[str, Any]] = [{**json.loads(line), "messages": []} for line in lines]
    gaps = [
        answer_turn(model, tokenizer, chats, turn, options.max_new_tokens, options.batch)
        for turn in range(max(len(chat["turns"]) for chat in chats))
    ]
    made_by = {
        "model": NAME,
        "dtype": "float32",
        "temperature": 0,
        "max_new_tokens": options.max_new_tokens,
        "min_top2_gap": MIN_GAP,
        "tokenizer_fingerprint": tokenizer_fingerprint(tokenizer),
    }
    buffer = io.BytesIO()
    with gzip.GzipFile(fileobj=buffer, mode="wb", mtime=0) as packed:
        for chat in chats:
            kept = {name: chat[name] for name in ("id", "category", "language", "messages")}
            packed.write((json.dumps({**kept, "generated_by": made_by}, ensure_ascii=False) + "\n").encode())
    write_bytes(options.out, buffer.getvalue())
    answers = [m for chat in chats for m in chat["messages"] if m["role"] == "assistant"]
    tokens = sum(len(answer["answer_ids"]) for answer in answers)
    cut = sum(not answer["finished"] for answer in answers)
    print(
        f"{options.out}: {len(chats)} conversations, {len(answers)} answers ({cut} unfinished), {tokens:,} "
        f"answer tokens, smallest gap of two best logits {min(gaps):.1e}, {len(buffer.getvalue()):,} bytes"
    )


if __name__ == "__main__":
    main()
