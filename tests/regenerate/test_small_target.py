"""The shipped answers, made anew on the real small target."""

from __future__ import annotations

import gzip
import importlib.resources
import json
from pathlib import Path

from eagle_train.regenerate.answers import AnswerSettings
from eagle_train.regenerate.regenerate import regenerate

TOKENS = 12


def test_shipped_answers_are_those_of_the_target(tmp_path: Path, small_target_dir: Path) -> None:
    """Four conversations in one batch: each first answer begins with the very tokens that are shipped."""
    packed = importlib.resources.files("eagle_train.data.builtin") / "conversations.jsonl.gz"
    shipped = [json.loads(line) for line in gzip.decompress(packed.read_bytes()).splitlines()][::100]
    data = tmp_path / "a.jsonl"
    data.write_text(
        "".join(json.dumps({"id": r["id"], "messages": r["messages"][:2]}) + "\n" for r in shipped)
    )
    regenerate(
        [str(data)],
        small_target_dir,
        tmp_path / "out.jsonl",
        settings=AnswerSettings(max_new_tokens=TOKENS),
        dtype="fp32",
        device="cpu",
        show=False,
    )
    made = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert [line["id"] for line in made] == [record["id"] for record in shipped]
    for line, record in zip(made, shipped, strict=True):
        assert line["messages"][1]["answer_ids"] == record["messages"][1]["answer_ids"][:TOKENS]
    assert (
        made[0]["generated_by"]["tokenizer_fingerprint"]
        == shipped[0]["generated_by"]["tokenizer_fingerprint"]
    )
