"""Make the conversations that the package ships: our prompts, answered greedily by the small target.

    python scripts/make_conversations.py --out eagle_train/data/builtin/conversations.jsonl.gz

Prompts come from ``scripts/prompts.jsonl``; answers from the built-in target in fp32, as ``eagle regenerate``
makes them. An answer ends (marked unfinished) before the first token whose two best logits are closer than
MIN_GAP, so that no change in the order of summation can turn the text into something else. Interrupted, the
same call goes on. Output is the Answers record, with each prompt's category and language.
"""

from __future__ import annotations

import argparse
import gzip
import json
from pathlib import Path
from typing import Any

from eagle_train.io.text import write_bytes
from eagle_train.regenerate.answers import AnswerSettings
from eagle_train.regenerate.regenerate import regenerate
from eagle_train.targets.builtin import NAME, small_target

MIN_GAP = 1e-4
_KEPT = ("dtype", "fingerprint", "tokenizer_fingerprint", "temperature", "max_new_tokens", "min_top2_gap")


def main() -> None:
    """Answer all prompts and write the compressed records."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--prompts", type=Path, default=Path(__file__).with_name("prompts.jsonl"))
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--answers", type=Path, default=Path("answers.jsonl"), help="where answers are kept")
    parser.add_argument("--max-new-tokens", type=int, default=300)
    parser.add_argument("--batch", type=int, default=32)
    options = parser.parse_args()
    report = regenerate(
        [str(options.prompts)],
        small_target(),
        options.answers,
        settings=AnswerSettings(max_new_tokens=options.max_new_tokens, min_gap=MIN_GAP),
        dtype="fp32",
        device="cpu",
        num_slots=options.batch,
    )
    prompts = {prompt["id"]: prompt for prompt in _lines(options.prompts)}
    records = []
    for answered in _lines(options.answers):
        prompt, made_by = prompts[answered["id"]], answered["generated_by"]
        kept = {name: prompt[name] for name in ("id", "category", "language")}
        made_by = {"model": NAME, **{name: made_by[name] for name in _KEPT}}
        records.append({**kept, "messages": answered["messages"], "generated_by": made_by})
    text = "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records)
    write_bytes(options.out, gzip.compress(text.encode(), mtime=0))
    print(
        f"{options.out}: {report['conversations']} conversations, {report['answers']} answers "
        f"({report['unfinished']} unfinished), {report['answer_tokens']:,} answer tokens"
    )


def _lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


if __name__ == "__main__":
    main()
