"""What comes to prepare as tokens: answers by their ids, rows already tokenized, rows prepared before."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import datasets
import pytest

from eagle_train.data.rows import open_rows
from eagle_train.data.tokenizer import load_tokenizer
from eagle_train.errors import UserError
from eagle_train.provenance import tokenizer_fingerprint

from .small import make, many, talk, target_with, write


def test_answers_of_the_target_are_used_by_their_ids(tmp_path: Path, target: Path) -> None:
    tokenizer = load_tokenizer(str(target))
    letters = [tokenizer.convert_tokens_to_ids(letter) for letter in "Hello"]
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    mine = {"model": "m", "tokenizer_fingerprint": tokenizer_fingerprint(tokenizer)}
    records = [
        talk("Hi", "Hello", generated_by=mine),
        talk("Hi", "Hello", generated_by=mine),
        talk("Hi", "Hello", generated_by={**mine, "tokenizer_fingerprint": "0" * 16}),
    ]
    for record, ids, finished in zip(
        records, ([*letters, end], letters, letters), (True, False, True), strict=True
    ):
        record["messages"][1] |= {"answer_ids": ids, "finished": finished}
    summary = make(write(tmp_path / "a.jsonl", records), target, tmp_path / "rows")
    whole, cut, other = (
        row["input_ids"][row["spans"][0][0] : row["spans"][0][1] + 1]
        for row in open_rows(tmp_path / "rows").dataset
    )
    assert whole == [*letters, end]
    assert cut == letters
    assert other == [*tokenizer("Hello", add_special_tokens=False)["input_ids"], end] != whole
    assert summary["counts"]["repaired"] == {"answer ids of another tokenizer: text tokenised again": 1}


@pytest.mark.parametrize("ids", [[5, 6], [5, 6, 2], [2**31 - 1], [2]])
def test_answer_ids_that_say_something_else_are_not_used(
    tmp_path: Path, target: Path, ids: list[int]
) -> None:
    tokenizer = load_tokenizer(str(target))
    text, end = "Because the sea is deep.", tokenizer.convert_tokens_to_ids("<|im_end|>")
    mine = {"model": "m", "tokenizer_fingerprint": tokenizer_fingerprint(tokenizer)}
    record = talk("Hi", text, generated_by=mine)
    record["messages"][1] |= {"answer_ids": ids, "finished": True}
    summary = make(write(tmp_path / "a.jsonl", [record]), target, tmp_path / "rows")
    (row,) = open_rows(tmp_path / "rows").dataset
    ((first, last),) = row["spans"]
    usual = tokenizer(text, add_special_tokens=False)["input_ids"]
    assert row["input_ids"][first : last + 1] == [*usual, end]
    assert summary["counts"]["repaired"] == {
        "answer ids that are not tokens of the answer: text tokenised again": 1
    }


def test_token_rows_need_no_template_and_stay_as_they_are(tmp_path: Path, byte_level: Any) -> None:
    target = target_with(tmp_path / "target", byte_level(None))
    records = [
        {"input_ids": [5, 6, 7, 8, 9, 10], "loss_mask": [0, 0, 1, 1, 1, 0], "spans": [[2, 3], [4, 4]]},
        {"input_ids": [5, 6, 7], "loss_mask": [0, 0, 0]},
        {"input_ids": [5, 6, 7], "loss_mask": [1, 1, 1]},
        {"input_ids": [5, 6, 99999], "loss_mask": [0, 1, 1]},
    ]
    summary = make(write(tmp_path / "a.jsonl", records), target, tmp_path / "rows")
    (row,) = open_rows(tmp_path / "rows").dataset
    assert row["input_ids"] == records[0]["input_ids"]
    assert row["loss_mask"] == records[0]["loss_mask"]
    assert row["spans"] == [[2, 3], [4, 4]]
    assert summary["counts"]["skipped"] == {
        "loss_mask supervises nothing": 1,
        "loss_mask supervises the first token: no prompt before the answer": 1,
        "a token id outside the tokenizer's vocabulary": 1,
    }


def test_prepared_rows_can_be_prepared_again_by_the_same_tokenizer_only(
    tmp_path: Path, target: Path, byte_level: Any
) -> None:
    data = write(tmp_path / "a.jsonl", many(20))
    make(data, target, tmp_path / "rows")
    make(tmp_path / "rows", target, tmp_path / "again")
    first, again = open_rows(tmp_path / "rows").dataset, open_rows(tmp_path / "again").dataset
    for column in ("row_id", "conversation_id", "input_ids", "loss_mask", "spans"):
        assert first[column] == again[column]
    other = byte_level("chatml")
    other.add_tokens(["<more>"])
    with pytest.raises(UserError, match="its tokens are of tokenizer"):
        make(tmp_path / "rows", target_with(tmp_path / "other", other), tmp_path / "third")


def test_damaged_rows_folders_are_named(tmp_path: Path, target: Path) -> None:
    with pytest.raises(UserError, match="not found; make the rows with: eagle prepare"):
        open_rows(tmp_path)
    data = write(tmp_path / "a.jsonl", many(3))
    make(data, target, tmp_path / "rows")
    info = json.loads((tmp_path / "rows" / "rows.json").read_text())
    (tmp_path / "rows" / "rows.json").write_text(json.dumps({**info, "rows": 4}))
    with pytest.raises(UserError, match=r"holds 3 rows, rows\.json says 4"):
        open_rows(tmp_path / "rows")
    (tmp_path / "rows" / "rows.json").write_text(json.dumps({**info, "format_version": 99}))
    with pytest.raises(UserError, match="format 99, wanted 1"):
        open_rows(tmp_path / "rows")
    (tmp_path / "rows" / "rows.json").write_text(json.dumps(info))
    rows = open_rows(tmp_path / "rows").dataset
    for name, values, told in [
        ("spans", [[[1, 2, 3]]] * 3, "column spans holds lists of .3. places"),
        ("spans", ["1-2"] * 3, "column spans is Value"),
        ("input_ids", [["a"]] * 3, "column input_ids is List"),
        ("source", None, "column source is None"),
    ]:
        edited = rows.remove_columns([name])
        edited = edited if values is None else edited.add_column(name, values)
        if told.startswith("column spans holds"):
            edited = edited.cast_column(name, rows.features[name])
        edited.save_to_disk(str(tmp_path / f"edited-{told[:25]}"))
        (tmp_path / f"edited-{told[:25]}" / "rows.json").write_text(json.dumps(info))
        with pytest.raises(UserError, match=told):
            open_rows(tmp_path / f"edited-{told[:25]}")
    (tmp_path / "rows" / "data-00000-of-00001.arrow").write_bytes(b"nothing")
    with pytest.raises(UserError, match="damaged rows"):
        open_rows(tmp_path / "rows")


def test_a_tokenizer_that_was_used_with_cutting_and_padding_is_the_same(
    tmp_path: Path, byte_level: Any
) -> None:
    """Some tokenizer files ask for both by themselves, and every call of the library may set them."""
    tokenizer = byte_level("chatml")
    tokenizer.pad_token = "</s>"
    before = tokenizer_fingerprint(tokenizer)
    plain = target_with(tmp_path / "plain", tokenizer)
    tokenizer(["Hi", "Hello there"], truncation=True, max_length=1, padding=True)
    assert tokenizer.backend_tokenizer.truncation
    assert tokenizer.backend_tokenizer.padding
    assert tokenizer_fingerprint(tokenizer) == before
    assert tokenizer.backend_tokenizer.truncation["max_length"] == 1, "it is left as it was"
    cutting = tmp_path / "cutting"
    tokenizer.save_pretrained(cutting)
    assert '"max_length": 1' in (cutting / "tokenizer.json").read_text()
    data = write(tmp_path / "a.jsonl", [talk("Hi", "Hello there")])
    mine = {"tokenizer_fingerprint": tokenizer_fingerprint(load_tokenizer(str(cutting)))}
    letters = [tokenizer.convert_tokens_to_ids(letter) for letter in "Hello"]
    own = talk("Hi", "Hello", generated_by=mine)
    own["messages"][1] |= {"answer_ids": letters, "finished": False}
    write(data, [talk("Hi", "Hello there"), own])
    make(data, cutting, tmp_path / "rows")
    make(data, plain, tmp_path / "other")
    rows = [open_rows(tmp_path / name).dataset[:] for name in ("rows", "other")]
    assert rows[0] == rows[1]
    assert rows[0]["input_ids"][1][-5:] == letters


def test_token_rows_in_parquet(tmp_path: Path, target: Path) -> None:
    columns = {
        "input_ids": [[5, 6, 7, 8], [5, 6, 9]],
        "loss_mask": [[0, 1, 1, 0], [0, 0, 1]],
        "score": [1.0, 2.0],
    }
    features = datasets.Features(
        input_ids=datasets.List(datasets.Value("int64")),
        loss_mask=datasets.List(datasets.Value("bool")),
        score=datasets.Value("float32"),
    )
    datasets.Dataset.from_dict(columns, features).to_parquet(str(tmp_path / "a.parquet"))
    make(tmp_path / "a.parquet", target, tmp_path / "rows")
    rows = open_rows(tmp_path / "rows").dataset
    assert rows["input_ids"][:] == columns["input_ids"]
    assert rows["loss_mask"][:] == columns["loss_mask"]
    assert rows["spans"][:] == [[[1, 2]], [[2, 2]]]
