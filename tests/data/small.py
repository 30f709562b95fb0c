"""Conversations, a target and a run of prepare, as small as they come."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

from eagle_train.data.prepare import prepare


def talk(*texts: str, **fields: Any) -> dict[str, Any]:
    roles = ("user", "assistant")
    return {"messages": [{"role": roles[n % 2], "content": text} for n, text in enumerate(texts)], **fields}


def write(path: Path, records: list[Any]) -> Path:
    path.write_text("".join(json.dumps(item) + "\n" for item in records))
    return path


def target_with(folder: Path, tokenizer: Any) -> str:
    tokenizer.save_pretrained(folder)
    return str(folder)


def make(data: Path, target: Path | str, out: Path, **options: Any) -> dict[str, Any]:
    return prepare([str(data)], str(target), out, show=False, **{"num_proc": 1, **options})


def many(count: int) -> list[Any]:
    draw = random.Random(0)
    words = ["Hello", "Paris", "capital", "how", "\n\n", "é", "🙂", "?"]
    return [
        talk(
            *(
                " ".join(draw.choices(words, k=draw.randint(1, 40))) + "."
                for _ in range(2 * draw.randint(1, 3))
            )
        )
        for _ in range(count)
    ]
