"""The mask on the real small target: SmolLM2's own tokenizer and template."""

from __future__ import annotations

import json
from pathlib import Path

from eagle_train.data.inspect import bracketed, describe_row
from eagle_train.data.prepare import prepare
from eagle_train.data.rows import open_rows


def test_rows_of_the_small_target_by_value(tmp_path: Path, small_target_dir: Path) -> None:
    turns = ["What is 2+2?", "\n\nIt is 4.", "And 3+3?", "6 🙂 "]
    messages = [{"role": ("user", "assistant")[n % 2], "content": text} for n, text in enumerate(turns)]
    data = tmp_path / "a.jsonl"
    data.write_text(json.dumps({"messages": messages}))
    prepare([str(data)], str(small_target_dir), tmp_path / "rows", show=False)
    rows = open_rows(tmp_path / "rows")
    row = describe_row(rows, 0)
    assert bracketed(row["segments"]) == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
        "<|im_start|>user\nWhat is 2+2?<|im_end|>\n<|im_start|>assistant\n⟦\n\nIt is 4.<|im_end|>⟧\n"
        "<|im_start|>user\nAnd 3+3?<|im_end|>\n<|im_start|>assistant\n⟦6 🙂 <|im_end|>⟧\n"
    )
    (first, last), (second, end) = row["spans"]
    ids, texts = row["input_ids"], row["token_texts"]
    assert (texts[first - 1], texts[first], texts[last], texts[last + 1]) == ("\n", "\n", "<|im_end|>", "\n")
    assert (texts[second - 1], texts[second], texts[end]) == ("\n", "6", "<|im_end|>")
    assert ids[last] == ids[end] == 2
    assert ids[0] == 1
    assert rows.info["end_of_turn"] == {"id": 2, "text": "<|im_end|>"}
    assert sum(row["loss_mask"]) == last - first + 1 + end - second + 1
