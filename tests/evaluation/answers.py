"""A random head, and files of answers that a target wrote."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from eagle_train.decoding.loop import Generation, Settings, plain
from eagle_train.evaluation.questions import Question, conversations
from eagle_train.heads.config import HeadConfig
from eagle_train.heads.disk import build_head
from eagle_train.provenance import tokenizer_fingerprint
from eagle_train.targets.load import Target

QUESTIONS = [
    Question(str(i), ("sea", "", "moon", "sea")[i], (f"Question {i}: " + "why is it so? " * i,))
    for i in range(4)
]


def some_head(target: Target, kind: str):
    torch.manual_seed(0)
    head = build_head(HeadConfig.for_target(target.config.to_dict(), kind))
    with torch.no_grad():
        if kind == "eagle3":
            head.lm_head.weight.copy_(target.frozen().lm_head)
    return head


def write_answers(target: Target, file: Path) -> None:
    """The target's greedy answers to the questions, as an Answers file."""
    records = []
    for question, conversation in conversations(target.tokenizer, QUESTIONS):
        made = plain(target, conversation.ask(0), Settings(max_new_tokens=24))
        records.append(record_of(target, question, made))
    write_records(target, records, file)


def record_of(target: Target, question: Question, made: Generation) -> dict[str, Any]:
    text = target.tokenizer.decode(made.ids, skip_special_tokens=True)
    answer = {"role": "assistant", "content": text, "answer_ids": made.ids, "finished": made.ended}
    named = {"category": question.category} if question.category else {}
    return {"id": question.id, **named, "messages": [{"role": "user", "content": question.turns[0]}, answer]}


def write_records(target: Target, records: list[dict[str, Any]], file: Path) -> None:
    made_by = {"model": "tiny", "tokenizer_fingerprint": tokenizer_fingerprint(target.tokenizer)}
    lines = (json.dumps({**record, "generated_by": made_by}) for record in records)
    file.write_text("".join(f"{line}\n" for line in lines))
