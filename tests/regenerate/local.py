"""Answers made in process, and their naive twin."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from eagle_train.decoding.loop import Settings, plain
from eagle_train.regenerate.answers import AnswerSettings
from eagle_train.regenerate.regenerate import regenerate
from eagle_train.targets.load import Target

from .asking import STOPS, asked_again

SETTINGS = AnswerSettings(max_new_tokens=24)
HOW = ("--max-new-tokens", "24", "--dtype", "fp32", "--device", "cpu", "--batch", "4")  # as `make` does


def make(data: Path, target: Target | Path, out: Path, **options: Any) -> dict[str, Any]:
    how = {"settings": SETTINGS, "num_slots": 4, "device": "cpu", "dtype": "fp32", **options}
    return regenerate([str(data)], target, out, show=False, **how)


def one_by_one(target: Target, record: dict[str, Any]) -> list[dict[str, Any]]:
    """The naive twin: every turn on the new history, each prompt alone."""
    tokenizer = target.tokenizer

    def answer(messages: list[dict[str, Any]]) -> dict[str, Any] | None:
        shown = [{"role": m["role"], "content": m["content"]} for m in messages]
        text = tokenizer.apply_chat_template(shown, tokenize=False, add_generation_prompt=True)
        prompt = tokenizer(text, add_special_tokens=False)["input_ids"]
        ids = plain(target, prompt, Settings(SETTINGS.max_new_tokens, eos_ids=tuple(STOPS))).ids
        finished = ids[-1] in STOPS
        content = tokenizer.decode(ids[:-1] if finished else ids)
        if not content.strip():
            return None
        return {"role": "assistant", "content": content, "answer_ids": ids, "finished": finished}

    return asked_again(record["messages"], answer)
