"""The papers' question sets by name, from the hub: 80 questions each, evenly spread over the set."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from eagle_train import hub
from eagle_train.errors import UserError

_NUMBER = 80  # as the papers on EAGLE have it


@dataclass(frozen=True)
class HubSet:
    """Where a set lies and how a record becomes a question's turns."""

    repository: str
    config: str | None
    split: str
    category: str
    turns: Callable[[Any], list[str]]


def _alpaca(record: Any) -> list[str]:
    return [f"{record['instruction']}\n\n{record['input']}".strip()]


SETS = {
    "mt_bench": HubSet("HuggingFaceH4/mt_bench_prompts", None, "train", "", lambda r: list(r["prompt"])),
    "gsm8k": HubSet("openai/gsm8k", "main", "test", "math", lambda r: [r["question"]]),
    "humaneval": HubSet(
        "openai/openai_humaneval", None, "test", "code", lambda r: [f"Complete this code.\n\n{r['prompt']}"]
    ),
    "alpaca": HubSet("tatsu-lab/alpaca", None, "train", "instructions", _alpaca),
    "cnn_dm": HubSet(
        "abisee/cnn_dailymail", "3.0.0", "test", "summarising", lambda r: [f"Summarize: {r['article']}"]
    ),
}


def hub_records(name: str) -> list[dict[str, Any]]:
    """Return the records of a named set in MT-bench form. Raises UserError where the hub does not give it."""
    import datasets

    wanted = SETS[name]
    with hub.asked_once(wanted.repository) as silent:
        try:
            found = datasets.load_dataset(wanted.repository, wanted.config, split=wanted.split)
        except (OSError, ValueError, RuntimeError, datasets.exceptions.DatasetsError) as error:
            reason = silent or (str(error).strip().splitlines() or [type(error).__name__])[0]
            raise UserError(
                f"--questions {name}: the hub gave no {wanted.repository} ({reason}); check the network, "
                "HF_TOKEN and HF_HUB_OFFLINE, or give a file of JSON lines with question_id, category, turns"
            ) from error
    number = min(_NUMBER, len(found))
    records = ((i, found[i * len(found) // number]) for i in range(number))
    return [
        {
            "question_id": f"{name}-{i}",
            "category": record.get("category") or wanted.category,
            "turns": wanted.turns(record),
        }
        for i, record in records
    ]
