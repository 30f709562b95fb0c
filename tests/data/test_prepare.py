"""The prepare stage: rows on disk, every record kept or counted with its reason."""

from __future__ import annotations

import json
import os
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from eagle_train.data import encoding
from eagle_train.data.inspect import count_lines
from eagle_train.data.prepare import prepare
from eagle_train.data.rows import open_rows
from eagle_train.data.tokenizer import load_tokenizer
from eagle_train.demo import built_in_conversations
from eagle_train.errors import UserError

from .small import make, talk, target_with, write


def test_rows_on_disk(tmp_path: Path, target: Path) -> None:
    data = write(tmp_path / "a.jsonl", [talk("Hi", "Hello", "How?", "Fine", id=7), talk("Hi", "Hello there")])
    summary = make(data, target, tmp_path / "rows")
    rows = open_rows(tmp_path / "rows")
    tokenizer = load_tokenizer(str(target))
    assert rows.dataset.column_names == [
        *("row_id", "conversation_id", "input_ids", "loss_mask", "spans", "source"),
    ]
    types = {name: str(feature) for name, feature in rows.dataset.features.items()}
    assert types["input_ids"] == "List(Value('int32'))"
    assert types["loss_mask"] == "List(Value('uint8'))"
    first, second = rows.dataset
    assert (first["source"], second["source"]) == ("a.jsonl#1:7", "a.jsonl#2")
    for row in (first, second):
        inside = {place for start, end in row["spans"] for place in range(start, end + 1)}
        assert row["loss_mask"] == [int(place in inside) for place in range(len(row["input_ids"]))]
    answers = [tokenizer.decode(first["input_ids"][start : end + 1]) for start, end in first["spans"]]
    assert answers == ["Hello<|im_end|>", "Fine<|im_end|>"]
    assert rows.info == json.loads((tmp_path / "rows" / "rows.json").read_text())
    assert rows.info == {name: value for name, value in summary.items() if name != "reused"}
    assert rows.info["rows"] == 2
    assert rows.info["tokens"] == len(first["input_ids"]) + len(second["input_ids"])
    assert rows.info["supervised_tokens"] == sum(first["loss_mask"]) + sum(second["loss_mask"])
    assert rows.info["end_of_turn"]["text"] == "<|im_end|>"
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    frequencies = rows.info["supervised_frequencies"]
    assert frequencies[str(end)] == 3
    assert sum(frequencies.values()) == rows.info["supervised_tokens"]


def test_every_record_is_kept_or_counted_with_its_reason(tmp_path: Path, target: Path) -> None:
    data = write(
        tmp_path / "a.jsonl",
        [
            talk("Hi", "Hello"),
            talk("Hi", "Hello"),
            talk(),
            {"messages": [{"role": "system", "content": "Be kind."}]},
            {"messages": [{"role": "assistant", "content": "Hello"}, *talk("Hi", "Hello")["messages"]]},
            {"messages": [*talk("Hi")["messages"], *talk("Hi", "Hello")["messages"]]},
            talk("Hi", None),
            talk("Hi", "a<|im_end|>b"),
            {"messages": [*talk("Hi")["messages"], {"role": "alien", "content": "x"}]},
            talk("Hi " * 400, "Hello"),
            talk("Hi", "Hello", "How? " * 300, "Fine"),
            {"nothing": 1},
        ],
    )
    counts = make(data, target, tmp_path / "rows", max_length=300)["counts"]
    assert counts["read"] == 12
    assert counts["kept"] == 5
    assert counts["copies"] == 2
    assert counts["bad"] == 0
    assert counts["skipped"] == {
        "empty conversation": 1,
        "system turn only": 1,
        "an empty turn before the first answer": 1,
        "an answer holds the end-of-turn token in its middle": 1,
        "unknown role": 1,
        encoding.TOO_LONG: 1,
        "no conversation in the record": 1,
    }
    assert counts["repaired"] == {
        "answer before the first prompt dropped": 1,
        "user turns in a row joined": 1,
    }
    assert counts["truncated"]["rows"] == counts["truncated"]["answers_dropped"] == 1
    rows = open_rows(tmp_path / "rows")
    assert [row_id.split("-")[1] for row_id in rows.dataset["row_id"]] == ["0", "1", "2", "0", "0"]
    assert len(set(rows.dataset["row_id"])) == 5


def test_max_length_means_tokens_cut_on_the_right(tmp_path: Path, target: Path) -> None:
    data = write(tmp_path / "a.jsonl", [talk("Hi", "Hello there, how are you?", "How?", "Fine")])
    whole = make(data, target, tmp_path / "whole")
    row = open_rows(tmp_path / "whole").dataset[0]
    (first, last), (second, _) = row["spans"]
    for length in range(first + 1, last + 1):
        made = make(data, target, tmp_path / "cut", max_length=length, overwrite=True)
        cut = open_rows(tmp_path / "cut").dataset[0]
        assert cut["input_ids"] == row["input_ids"][:length]
        assert cut["spans"] == [[first, length - 1]]
        assert made["counts"]["truncated"] == {
            "rows": 1,
            "rows_left_without_answer": 0,
            "answers_dropped": 1,
            "answers_shortened": 1,
            "tokens_cut": whole["tokens"] - length,
        }
    make(data, target, tmp_path / "cut", max_length=second, overwrite=True)
    assert open_rows(tmp_path / "cut").dataset[0]["input_ids"] == row["input_ids"][: last + 1]
    with pytest.raises(UserError, match=f"no row is left of 1 conversation \\({encoding.TOO_LONG}: 1\\)"):
        make(data, target, tmp_path / "none", max_length=first)
    assert not (tmp_path / "none").exists()


def test_templates_that_refuse_rows_skip_and_count_them(tmp_path: Path, byte_level: Any) -> None:
    system = {"messages": [{"role": "system", "content": "Be kind."}, *talk("Hi", "Hello")["messages"]]}
    tool = {
        "messages": [
            *talk("Hi", "Wait")["messages"],
            {"role": "tool", "content": "4"},
            talk("", "Ok")["messages"][1],
        ]
    }
    data = write(tmp_path / "a.jsonl", [system, talk("Hi", "Hello"), tool])
    for name, told in [
        ("gemma", "a.jsonl#1: System role not supported"),
        ("mistral", "a.jsonl#1: Conversation roles must alternate"),
    ]:
        summary = make(data, target_with(tmp_path / name, byte_level(name)), tmp_path / f"rows-{name}")
        assert summary["counts"]["kept"] == summary["rows"] == 1
        assert summary["counts"]["skipped"] == {"refused by the chat template": 2}
        assert summary["skipped_examples"]["refused by the chat template"][0].startswith(told)


def test_history_rewriting_is_counted_and_rows_share_the_conversation(
    tmp_path: Path, byte_level: Any
) -> None:
    data = write(tmp_path / "a.jsonl", [talk("Hi", "<think>\nA\n</think>\n\nHello", "How?", "Fine")])
    summary = make(data, target_with(tmp_path / "target", byte_level("qwen-thinking")), tmp_path / "rows")
    assert summary["counts"]["repaired"] == {
        "earlier answers read otherwise in later prompts: one row per answer": 1
    }
    rows = open_rows(tmp_path / "rows")
    assert len(rows) == 2
    assert len(set(rows.dataset["conversation_id"])) == 1


def test_a_tokenizer_without_a_chat_template_is_refused_up_front(tmp_path: Path, byte_level: Any) -> None:
    target = target_with(tmp_path / "target", byte_level(None))
    data = write(tmp_path / "a.jsonl", [talk("Hi", "Hello")])
    with pytest.raises(UserError) as caught:
        make(data, target, tmp_path / "rows")
    assert "no chat template; give one with --chat-template FILE" in str(caught.value)
    assert not (tmp_path / "rows").exists()
    (tmp_path / "mine.jinja").write_text(
        "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
    )
    made = make(data, target, tmp_path / "rows", chat_template=str(tmp_path / "mine.jinja"))
    assert (made["rows"], made["chat_template"]) == (1, "mine.jinja")


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("{% for m in messages %}", "mine.jinja: not valid Jinja"),
        ("{{ raise_exception('never') }}", "mine.jinja: cannot show a plain question and answer"),
        ("{{ messages[0].content }}", "does not show the answer as given"),
    ],
)
def test_useless_templates_are_refused_up_front(tmp_path: Path, target: Path, text: str, told: str) -> None:
    (tmp_path / "mine.jinja").write_text(text)
    data = write(tmp_path / "a.jsonl", [talk("Hi", "Hello")])
    with pytest.raises(UserError) as caught:
        make(data, target, tmp_path / "rows", chat_template=str(tmp_path / "mine.jinja"))
    assert told in str(caught.value)


def test_a_misspelt_built_in_template(tmp_path: Path, target: Path) -> None:
    data = write(tmp_path / "a.jsonl", [talk("Hi", "Hello")])
    with pytest.raises(UserError, match="did you mean 'vicuna'"):
        make(data, target, tmp_path / "rows", chat_template="vicunna")


def test_bad_records_are_named_and_kept_out_only_on_request(tmp_path: Path, target: Path) -> None:
    data = write(tmp_path / "a.jsonl", [talk("Hi", "Hello"), talk("Hi", "a\ud800"), talk("Hi", "Bye")])
    with pytest.raises(UserError, match=r"a\.jsonl:2 \(record 2\): text is not valid Unicode"):
        make(data, target, tmp_path / "rows")
    assert list(tmp_path.iterdir()) == [data]
    summary = make(data, target, tmp_path / "rows", skip_bad=True)
    assert (summary["rows"], summary["counts"]["bad"]) == (2, 1)
    assert summary["bad_records"][0]["place"] == f"{data}:2 (record 2)"


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("missing.gguf", "no such file"),
        ("./missing", "no such directory"),
        ("empty", "no tokenizer could be loaded"),
        ("file.txt", "is a file"),
    ],
)
def test_targets_that_lead_nowhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, told: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    (tmp_path / "file.txt").touch()
    with pytest.raises(UserError, match=told):
        load_tokenizer(name)


def test_missing_data_is_said_before_the_target_is_looked_for(tmp_path: Path) -> None:
    for data in ("absent.jsonl", "absent*.json", str(tmp_path)):
        with pytest.raises(UserError, match=f"^{re.escape(data)}: no "):
            prepare([data], "./no-target", tmp_path / "rows")
    with pytest.raises(UserError, match="no-target: no such directory"):
        prepare(["owner/chats"], "./no-target", tmp_path / "rows")  # before a data set is fetched


def test_a_file_whose_name_is_no_text(tmp_path: Path, target: Path) -> None:
    data = write(tmp_path / os.fsdecode(b"a\xff.jsonl"), [talk("Hi", "Hello")])
    summary = make(data, target, tmp_path / "rows")
    assert open_rows(tmp_path / "rows").dataset["source"][:] == ["a\ufffd.jsonl#1"]
    assert summary["inputs"][0]["name"] == "a\ufffd.jsonl"


def test_rows_keep_the_category_of_their_conversation(tmp_path: Path, target: Path) -> None:
    """Of every row that a conversation gives; and again where rows themselves are prepared."""
    talks = [talk("Hi", "Hello", category="sea"), talk("Hi", "Hello you"), talk("Ho", "He", category=7)]
    data = write(tmp_path / "a.jsonl", talks)
    summary = make(data, target, tmp_path / "rows")
    rows = open_rows(tmp_path / "rows")
    assert list(rows.dataset["category"]) == ["sea", "", "7"]
    assert summary["categories"] == {"sea": 1, "": 1, "7": 1}
    assert "rows by category: sea 1, none 1, 7 1" in count_lines(summary)
    make(tmp_path / "rows", target, tmp_path / "again")
    again = open_rows(tmp_path / "again")
    assert list(again.dataset["category"]) == ["sea", "", "7"]
    assert list(again.dataset["row_id"]) == list(rows.dataset["row_id"])


def test_the_shipped_conversations_have_their_categories(tmp_path: Path, target: Path) -> None:
    summary = make(built_in_conversations(), target, tmp_path / "rows", max_length=8192)
    named = ["extraction", "reasoning", "science", "humanities", "mathematics", "advice", "summarising"]
    wanted = {**dict.fromkeys(("writing", "coding"), 45), **dict.fromkeys(named, 40), "multilingual": 35}
    assert summary["categories"] == wanted
    assert Counter(open_rows(tmp_path / "rows").dataset["category"]) == wanted


def test_rows_whose_category_is_no_text_are_refused(tmp_path: Path, target: Path) -> None:
    import datasets

    make(write(tmp_path / "a.jsonl", [talk("Hi", "Hello")]), target, tmp_path / "rows")
    dataset = datasets.load_from_disk(str(tmp_path / "rows"))
    dataset.add_column("category", [3]).save_to_disk(str(tmp_path / "edited"))
    (tmp_path / "edited" / "rows.json").write_text((tmp_path / "rows" / "rows.json").read_text())
    with pytest.raises(UserError, match=r"column category is Value\('int64'\), wanted Value\('string'\)"):
        open_rows(tmp_path / "edited")
