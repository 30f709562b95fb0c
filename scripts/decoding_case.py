"""What benchmarks of decoding take: a head, a target on one thread, and the first turns that are asked."""

from __future__ import annotations

import argparse

import torch

from eagle_train.evaluation.questions import conversations, read_questions
from eagle_train.targets.builtin import small_target
from eagle_train.targets.load import Target, load_target


def options(description: str | None, num_questions: int, max_new_tokens: int) -> argparse.ArgumentParser:
    """Return a parser of the options that these benchmarks share."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("head")
    parser.add_argument("target", nargs="?", help="the built-in small one by default")
    parser.add_argument("--dtype", default="fp32")
    parser.add_argument("--num-questions", type=int, default=num_questions)
    parser.add_argument("--max-new-tokens", type=int, default=max_new_tokens)
    parser.add_argument("--json", action="store_true")
    return parser


def open_case(given: argparse.Namespace) -> tuple[Target, list[list[int]]]:
    """Return the target, on the CPU, and the first turns' token ids; from now on torch has one thread."""
    torch.set_num_threads(1)
    target = load_target(given.target or str(small_target()), dtype=given.dtype, device="cpu")
    questions = read_questions(limit=given.num_questions)
    return target, [conversation.ask(0) for _, conversation in conversations(target.tokenizer, questions)]
