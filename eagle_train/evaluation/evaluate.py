"""Decode a set of questions in several ways and report acceptance, speed and losslessness."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from eagle_train.decoding.law import own_law
from eagle_train.decoding.loop import Settings
from eagle_train.decoding.sampling import Sampling
from eagle_train.decoding.shapes import Shape, check_size
from eagle_train.errors import UserError
from eagle_train.evaluation.comparison import Comparison
from eagle_train.evaluation.heads import checkpoint_of
from eagle_train.evaluation.methods import Method, Sizes, entries_of, entries_of_head
from eagle_train.evaluation.questions import Question, conversations, read_questions
from eagle_train.evaluation.turns import Turns
from eagle_train.heads.disk import Head
from eagle_train.progress import counted, progress
from eagle_train.targets.lengths import check_length, longest_text
from eagle_train.targets.load import Target, dtype_name, load_target

MOST_AT_ONCE = 256  # prompts


def evaluate(
    head: str | Path | Head | None,
    target: str | Path | Target,
    questions: str | Path | Sequence[Question] | None = None,
    drafts: Sequence[Shape] | None = None,
    *,
    methods: Sequence[Method] = (),
    sizes: Sizes | None = None,
    sampling: Sampling | None = None,
    block: bool = False,
    max_new_tokens: int = 128,
    num_questions: int | None = None,
    max_turns: int | None = None,
    dtype: str = "auto",
    chat_template: str | None = None,
    trust_remote_code: bool = False,
    device_map: str | None = None,
    seed: int = 0,
    batch: int = 1,
    processors: bool = True,
    show: bool = True,
    command: str = "eval",
) -> dict[str, Any]:
    """Answer every question with plain decoding, with the head under each of `drafts`, and by `methods`.

    `head` is a run (its best), a head directory, a hub id or a loaded head, or None where only `methods` are
    compared; `target` a name or a loaded target; `questions` a file in MT-bench form, a list, or None for the
    built-in held-out set. A later turn is asked on the history with plain decoding's answers, so all read the
    same prompts. A head is cast to the target's dtype (a copy of it where a module is given). `drafts` None
    means the usual tree of a head's kind. `block` accepts chains of samples as a whole. `batch` prompts are
    decoded at once, by every method, plain decoding included; tokens per second are then the whole batch's,
    and ``batch`` says how many were together at most. `processors` applies those that the target's
    generation_config sets, to every method and to plain decoding. `command` is who shows its progress.

    Returns what was run, ``plain``, and under ``results`` one dict per way; a single one's figures stand at
    the top level as well. ``lossless`` says whether all ids equal plain decoding's (greedy; None when
    sampling, where only the law is kept) and ``differences`` lists the first difference of each answer with
    the gap between the target's two best logits there. Raises UserError for anything the user must change.
    """
    if head is None and not methods:
        raise UserError("eval: got neither a head nor a method; give HEAD, or --method NAME")
    if not isinstance(target, Target):
        target = load_target(target, dtype=dtype, trust_remote_code=trust_remote_code, device_map=device_map)
    sampling = sampling or Sampling()
    sampling = own_law(target, sampling) if processors else sampling
    entries = [] if head is None else entries_of_head(head, target, drafts, sampling)
    for method in methods:
        entries += entries_of(method, target, drafts, sampling, sizes or Sizes())
    if questions is None or isinstance(questions, str | Path):
        questions = read_questions(questions, num_questions)
    check_size("batch: got {} prompts at once", batch, most=MOST_AT_ONCE)
    settings = Settings(max_new_tokens=max_new_tokens, sampling=sampling, seed=seed, block=block)
    _check_lengths(target, questions, max_new_tokens, chat_template)
    turns = Turns(target, questions, max_turns, max_new_tokens, chat_template)
    if show:
        print(f"{command}: {_ahead(turns.total, len(entries), max_new_tokens)}", file=sys.stderr)
    most = turns.total * (1 + len(entries)) * max_new_tokens
    with progress(command, most, "tokens", show) as bar:
        run = Comparison(target, entries, settings, bar)
        together = 1
        for group in turns.groups(batch):
            together = max(together, min(batch, len(group)))
            made = [run.answer(group[0])] if batch == 1 else run.answer_together(group, batch)
            for asked, answer in zip(group, made, strict=True):
                turns.take(asked, answer.ids)
    turns.warn()
    results = run.results()
    return {
        "target": target.name,
        "head": entries[0].source if head is not None else None,
        "checkpoint": checkpoint_of(head) if isinstance(head, str | Path) else None,
        "kind": entries[0].kind if head is not None else None,
        "questions": len(questions),
        "prompts": turns.total - turns.left_out,
        "turns_left_out": turns.left_out,
        "turns_cut_short": turns.cut_short,
        "max_new_tokens": max_new_tokens,
        "temperature": sampling.temperature,
        "top_k": sampling.top_k,
        "top_p": sampling.top_p,
        "repetition_penalty": sampling.repetition_penalty,
        "processors": sampling.processors.values if sampling.processors else {},
        "block": block,
        "batch": together,
        "dtype": dtype_name(target.dtype),
        "device": str(target.device),
        "threads": torch.get_num_threads(),
        **(results[0] if len(results) == 1 else {}),
        "plain": {
            "tokens": run.plain.new_tokens,
            "tokens_per_second": run.plain.tokens_per_second,
            "tokens_per_second_with_prefill": run.plain.tokens_per_second_with_prefill,
        },
        "results": results,
    }


def _ahead(prompts: int, ways: int, max_new_tokens: int) -> str:
    """Say how much is about to be decoded."""
    most = counted(prompts * (1 + ways) * max_new_tokens, "token")
    return (
        f"{counted(prompts, 'prompt')} by plain decoding and {counted(ways, 'other way')}, up to "
        f"{counted(max_new_tokens, 'token')} each: at most {most}"
    )


def _check_lengths(
    target: Target, questions: Sequence[Question], max_new_tokens: int, chat_template: str | None
) -> None:
    """Refuse first turns whose answers could pass the target's last position, before any decoding."""
    if longest_text(target.config) is None:
        return
    for question, conversation in conversations(target.tokenizer, list(questions), chat_template):
        length = len(conversation.ask(0)) + max_new_tokens
        where = f"question {question.id} with --max-new-tokens {max_new_tokens}"
        check_length(target.config, length, where)
