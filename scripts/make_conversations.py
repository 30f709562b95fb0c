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
import multiprocessing
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from transformers import AttentionInterface, AutoModelForCausalLM, AutoTokenizer
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

from eagle_train.io import write_bytes
from eagle_train.provenance import tokenizer_fingerprint
from eagle_train.targets.builtin import NAME, small_target

MIN_GAP = 1e-4
MODEL: Any = None  # of a worker process


def grouped_attention(
    module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: Any, **settings: Any
) -> tuple[torch.Tensor, None]:
    """One new token per row: query heads of a group stand in the time axis, so keys are not repeated.

    Query (B, heads, 1, D), key and value (B, groups, T, D); more than one token goes the usual way.
    """
    rows, heads, time_steps, width = query.shape
    groups = key.shape[1]
    if time_steps > 1:
        return sdpa_attention_forward(module, query, key, value, mask, **settings)
    folded = query.view(rows, groups, heads // groups, width)
    seen = mask[..., : key.shape[2]].expand(rows, 1, heads // groups, -1)
    out = F.scaled_dot_product_attention(folded, key, value, attn_mask=seen, scale=settings.get("scaling"))
    return out.reshape(rows, 1, heads, width), None


AttentionInterface.register("grouped", grouped_attention)
AttentionMaskInterface.register("grouped", sdpa_mask)


@torch.inference_mode()
def answer_batch(model: Any, prompts: list[list[int]], limit: int, end: int) -> list[list[int]]:
    """Greedy answers of at most `limit` tokens to left-padded prompts; the end-of-turn token is kept."""
    width = max(map(len, prompts))
    ids = torch.tensor([[end] * (width - len(p)) + p for p in prompts])
    mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts])
    made = model.generate(
        input_ids=ids,
        attention_mask=mask,
        max_new_tokens=limit,
        do_sample=False,
        pad_token_id=end,
        cache_implementation="static",
        disable_compile=True,
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


Job = tuple[list[list[int]], int]  # prompts of one batch, token limit
Answer = tuple[list[int], int, float]  # ids, how many were made before cutting, smallest gap


def load_model() -> None:
    """Give this worker process its own copy of the target, on one thread."""
    global MODEL
    torch.set_num_threads(1)
    MODEL = AutoModelForCausalLM.from_pretrained(
        small_target(), dtype=torch.float32, attn_implementation="grouped"
    ).eval()


def answer_job(job: Job) -> list[Answer]:
    """Answer one batch in a worker: greedy tokens, each checked, cut where greedy is in doubt."""
    prompts, limit = job
    answers = answer_batch(MODEL, prompts, limit, MODEL.config.eos_token_id)
    checked = []
    for prompt, answer in zip(prompts, answers, strict=True):
        kept, gap = robust_greedy_length(MODEL, prompt, answer)
        checked.append((answer[:kept], len(answer), gap))
    return checked


def answer_turn(
    pool: Any, tokenizer: Any, chats: list[dict[str, Any]], turn: int, limit: int, batch: int
) -> float:
    """Answer user turn `turn` of every chat that has one, in place. Returns the smallest gap seen."""
    end = tokenizer.eos_token_id
    asked = []
    for chat in chats:
        if turn < len(chat["turns"]):
            chat["messages"].append({"role": "user", "content": chat["turns"][turn]})
            text = tokenizer.apply_chat_template(chat["messages"], tokenize=False, add_generation_prompt=True)
            asked.append((tokenizer(text, add_special_tokens=False).input_ids, chat))
    asked.sort(key=lambda entry: len(entry[0]))
    groups = [asked[first : first + batch] for first in range(0, len(asked), batch)]
    jobs = [([prompt for prompt, _ in group], limit) for group in groups]
    smallest, started, count = float("inf"), time.time(), 0
    for number, (group, answers) in enumerate(zip(groups, pool.imap(answer_job, jobs), strict=True), 1):
        for (_, chat), (ids, made, gap) in zip(group, answers, strict=True):
            finished = bool(ids) and ids[-1] == end
            content = tokenizer.decode(ids[:-1] if finished else ids)
            chat["messages"].append(
                {"role": "assistant", "content": content, "answer_ids": ids, "finished": finished}
            )
            if len(ids) < made:
                print(f"{chat['id']}: {len(ids)} of {made} tokens kept", file=sys.stderr)
            smallest, count = min(smallest, gap), count + len(ids)
        rate = count / (time.time() - started)
        print(
            f"turn {turn + 1}: {number}/{len(jobs)} batches, {rate:.0f} tokens/s", file=sys.stderr, flush=True
        )
    return smallest


def main() -> None:
    """Answer all prompts and write the compressed records."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--prompts", type=Path, default=Path(__file__).with_name("prompts.jsonl"))
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--max-new-tokens", type=int, default=300)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--processes", type=int, default=os.cpu_count())
    options = parser.parse_args()
    tokenizer = AutoTokenizer.from_pretrained(small_target())
    lines = options.prompts.read_text(encoding="utf-8").splitlines()
    chats: list[dict[str, Any]] = [{**json.loads(line), "messages": []} for line in lines]
    longest = max(len(chat["turns"]) for chat in chats)
    with multiprocessing.get_context("spawn").Pool(options.processes, load_model) as pool:
        gaps = [
            answer_turn(pool, tokenizer, chats, turn, options.max_new_tokens, options.batch)
            for turn in range(longest)
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
