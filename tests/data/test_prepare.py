"""The prepare stage as a whole: counts, the cache, interruption, any number of processes."""

from __future__ import annotations

import json
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import datasets
import pytest

from eagle_train.data import encoding
from eagle_train.data.prepare import _Counts, prepare
from eagle_train.data.rows import open_rows
from eagle_train.data.templates import parse_arguments
from eagle_train.data.tokenizer import load_tokenizer
from eagle_train.errors import UserError
from eagle_train.provenance import tokenizer_fingerprint


def talk(*texts: str, **fields: Any) -> dict[str, Any]:
    roles = ("user", "assistant")
    return {"messages": [{"role": roles[n % 2], "content": text} for n, text in enumerate(texts)], **fields}


def write(path: Path, records: list[Any]) -> Path:
    path.write_text("".join(json.dumps(item) + "\n" for item in records))
    return path


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory, byte_level: Any) -> Path:
    folder = tmp_path_factory.mktemp("target")
    byte_level("chatml").save_pretrained(folder)
    return folder


def target_with(folder: Path, tokenizer: Any) -> str:
    tokenizer.save_pretrained(folder)
    return str(folder)


def make(data: Path, target: Path | str, out: Path, **options: Any) -> dict[str, Any]:
    return prepare([str(data)], str(target), out, show=False, **{"num_proc": 1, **options})


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
    with pytest.raises(UserError, match=f"no row is left of 1 conversations \\({encoding.TOO_LONG}: 1\\)"):
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


def test_the_same_input_is_not_prepared_twice(
    tmp_path: Path, target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = write(tmp_path / "a.jsonl", [talk("Hi", "Hello")])
    made = make(data, target, tmp_path / "rows")
    monkeypatch.setattr("eagle_train.data.prepare.encode_all", None)  # nothing may be encoded any more
    again = make(data, target, tmp_path / "rows")
    assert again["reused"]
    assert not made["reused"]
    assert {**again, "reused": False} == made
    moved = tmp_path / "elsewhere"
    moved.mkdir()
    shutil.copy(data, moved / "a.jsonl")
    assert make(moved / "a.jsonl", target, tmp_path / "rows")["reused"]


def test_other_input_into_the_same_folder_is_refused_with_what_differs(
    tmp_path: Path, target: Path, byte_level: Any
) -> None:
    data = write(tmp_path / "a.jsonl", [talk("Hi", "Hello")])
    make(data, target, tmp_path / "rows")
    with pytest.raises(UserError, match="max_length 2048 there, 100 now; give another --out, or --overwrite"):
        make(data, target, tmp_path / "rows", max_length=100)
    with pytest.raises(UserError, match="template_fingerprint"):
        make(data, target, tmp_path / "rows", chat_template="vicuna")
    other = byte_level("chatml")
    other.add_tokens(["<more>"])
    with pytest.raises(UserError, match="tokenizer_fingerprint"):
        make(data, target_with(tmp_path / "other", other), tmp_path / "rows")
    write(data, [talk("Hi", "Bye")])  # the same path and name, other content
    with pytest.raises(UserError, match=r"the input files differ \(a\.jsonl there\)"):
        make(data, target, tmp_path / "rows")
    assert not make(data, target, tmp_path / "rows", overwrite=True)["reused"]
    assert (
        load_tokenizer(str(target)).decode(open_rows(tmp_path / "rows").dataset[0]["input_ids"]).count("Bye")
        == 1
    )
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.jsonl", "other", "rows"]


def test_a_folder_that_holds_other_things_is_never_replaced(tmp_path: Path, target: Path) -> None:
    data = write(tmp_path / "a.jsonl", [talk("Hi", "Hello")])
    mine = tmp_path / "mine"
    mine.mkdir()
    (mine / "thesis.txt").write_text("years of work")
    for overwrite in (False, True):
        with pytest.raises(UserError, match="holds no prepared rows"):
            make(data, target, mine, overwrite=overwrite)
    assert (mine / "thesis.txt").read_text() == "years of work"


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


def test_any_number_of_processes_gives_the_same_rows(tmp_path: Path, target: Path) -> None:
    data = write(tmp_path / "a.jsonl", many(600))
    one = make(data, target, tmp_path / "one", num_proc=1)
    three = make(data, target, tmp_path / "three", num_proc=3)
    assert one == three
    for name in ("state.json", "dataset_info.json", "data-00000-of-00001.arrow", "rows.json"):
        assert (tmp_path / "one" / name).read_bytes() == (tmp_path / "three" / name).read_bytes()


def test_a_dead_worker_is_an_error_not_a_hang(
    tmp_path: Path, target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    parent = os.getpid()
    real = encoding.encode

    def dying(*arguments: Any) -> Any:
        if os.getpid() != parent:
            os.kill(os.getpid(), signal.SIGKILL)
        return real(*arguments)

    monkeypatch.setattr(encoding, "encode", dying)
    data = write(tmp_path / "a.jsonl", many(600))
    with pytest.raises(UserError, match="one of the 2 worker processes died"):
        make(data, target, tmp_path / "rows", num_proc=2)
    assert list(tmp_path.iterdir()) == [data]


@pytest.mark.parametrize("processes", [1, 2])
def test_an_interrupted_run_leaves_nothing_and_no_worker(
    tmp_path: Path, target: Path, monkeypatch: pytest.MonkeyPatch, processes: int
) -> None:
    real = _Counts.passing

    def interrupted(self: Any, outcomes: Any) -> Any:
        for number, outcome in enumerate(real(self, outcomes)):
            if number == 300:
                assert len(_children(os.getpid())) >= processes - 1
                raise KeyboardInterrupt
            yield outcome

    monkeypatch.setattr(_Counts, "passing", interrupted)
    data = write(tmp_path / "a.jsonl", many(2000))
    with pytest.raises(KeyboardInterrupt):
        make(data, target, tmp_path / "rows", num_proc=processes)
    assert list(tmp_path.iterdir()) == [data]
    assert not any(_alive(child) for child in _children(os.getpid()))


_COMMAND = [sys.executable, "-m", "eagle_cli.main", "prepare"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("sent", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 130), (signal.SIGKILL, -9)]
)
def test_interruption_leaves_nothing_half_written(tmp_path: Path, target: Path, sent: int, code: int) -> None:
    data = tmp_path / "a.jsonl"
    with open(data, "w") as handle:
        for record in many(300) * 100:
            handle.write(json.dumps(record) + "\n")
    command = [
        *_COMMAND,
        str(data),
        "--target",
        str(target),
        "--out",
        str(tmp_path / "rows"),
        "--num-proc",
        "2",
    ]
    child = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, start_new_session=True)
    deadline = time.monotonic() + 60
    while len(_children(child.pid)) < 2 and time.monotonic() < deadline:
        time.sleep(0.05)
    workers = _children(child.pid)
    assert list(tmp_path.glob(".rows.*.tmp/*.arrow"))
    if sent == signal.SIGINT:
        os.killpg(child.pid, sent)  # as Ctrl-C does: to everyone in the terminal's group
    else:
        child.send_signal(sent)
    _, said = child.communicate(timeout=60)
    assert child.returncode == code
    assert not (tmp_path / "rows").exists()
    if sent == signal.SIGKILL:
        assert list(tmp_path.glob(".rows.*.tmp"))
    else:
        assert "Traceback" not in said
        assert not list(tmp_path.glob(".rows.*.tmp"))
    deadline = time.monotonic() + 20
    while any(_alive(worker) for worker in workers) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert len(workers) >= 2
    assert not any(_alive(worker) for worker in workers)
    write(data, many(3))
    make(data, target, tmp_path / "rows")  # the next run also clears what a killed one left
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.jsonl", "rows"]


def _children(process: int) -> list[int]:
    found = []
    for entry in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = entry.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[1]) == process:
            found.append(int(entry.parent.name))
    return found


def _alive(process: int) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_a_full_disk_is_one_line_and_leaves_nothing(tmp_path: Path, target: Path) -> None:
    """A limit on file size stands for the full disk: a write fails in the middle all the same."""
    data = write(tmp_path / "a.jsonl", many(600))
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))
    try:
        with pytest.raises(UserError) as caught:
            make(data, target, tmp_path / "rows")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert str(caught.value).startswith(f"{tmp_path / 'rows'}: ")
    assert "limit does not allow a file of that size" in str(caught.value)
    assert list(tmp_path.iterdir()) == [data]
    assert make(data, target, tmp_path / "rows")["rows"] == 600


def test_prepare_refuses_to_run_on_many_ranks(
    tmp_path: Path, target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(UserError, match="one process; start it without torchrun"):
        make(tmp_path, target, tmp_path / "rows")


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


def test_progress_bars_of_the_library_stay_as_they_were(tmp_path: Path, target: Path) -> None:
    before = datasets.are_progress_bars_disabled()
    make(write(tmp_path / "a.jsonl", many(3)), target, tmp_path / "rows")
    assert datasets.are_progress_bars_disabled() == before


def answers(rows: Path, target: Path) -> list[list[str]]:
    """Return the supervised texts of every row."""
    tokenizer = load_tokenizer(str(target))
    return [
        [tokenizer.decode(row["input_ids"][first : last + 1]) for first, last in row["spans"]]
        for row in open_rows(rows).dataset
    ]


def test_only_the_last_answer_is_supervised_on_request(tmp_path: Path, target: Path, byte_level: Any) -> None:
    data = write(tmp_path / "a.jsonl", [talk("Hi", "Hello", "How?", "Fine"), talk("Hi", "Hello there")])
    make(data, target, tmp_path / "all")
    summary = make(data, target, tmp_path / "last", last_turn_only=True)
    assert answers(tmp_path / "all", target) == [
        ["Hello<|im_end|>", "Fine<|im_end|>"],
        ["Hello there<|im_end|>"],
    ]
    assert answers(tmp_path / "last", target) == [["Fine<|im_end|>"], ["Hello there<|im_end|>"]]
    whole, last = (open_rows(tmp_path / name).dataset[0] for name in ("all", "last"))
    assert last["input_ids"] == whole["input_ids"]
    first, end = last["spans"][0]
    assert [last["loss_mask"][place] for place in (first - 1, first, end, end + 1)] == [0, 1, 1, 0]
    assert sum(last["loss_mask"]) == end + 1 - first
    assert summary["last_turn_only"] is True
    with pytest.raises(UserError, match="last_turn_only True there, False now"):
        make(data, target, tmp_path / "last")
    with pytest.raises(UserError, match="no row is left of 2"):
        make(data, target, tmp_path / "cut", last_turn_only=True, max_length=first - 20)
    # A template that rewrites history gives one row an answer: the last row is left.
    thinking = target_with(tmp_path / "thinking", byte_level("qwen-thinking"))
    make(data, thinking, tmp_path / "rewritten", last_turn_only=True)
    assert answers(tmp_path / "rewritten", tmp_path / "thinking") == answers(tmp_path / "last", target)
    tokens = {"input_ids": [5, 6, 7, 8, 9], "loss_mask": [0, 1, 0, 1, 1]}
    make(write(tmp_path / "t.jsonl", [tokens]), target, tmp_path / "tokens", last_turn_only=True)
    assert open_rows(tmp_path / "tokens").dataset[0]["loss_mask"] == [0, 0, 0, 1, 1]


def test_duplicates_are_dropped_on_request(tmp_path: Path, target: Path) -> None:
    records = [talk("Hi", "Hello"), talk("Hi", "Bye"), talk("Hi", "Hello", id="again"), talk("Hi", "Hello")]
    data = write(tmp_path / "a.jsonl", records)
    kept = make(data, target, tmp_path / "kept")
    assert (kept["rows"], kept["counts"]["kept"], kept["counts"]["copies"]) == (4, 4, 2)
    made = make(data, target, tmp_path / "dropped", drop_duplicates=True)
    assert (made["rows"], made["counts"]["kept"], made["counts"]["copies_dropped"]) == (2, 2, 2)
    assert made["drop_duplicates"] is True
    assert answers(tmp_path / "dropped", target) == [["Hello<|im_end|>"], ["Bye<|im_end|>"]]
    assert made["supervised_tokens"] == sum(made["supervised_frequencies"].values())
    with pytest.raises(UserError, match=r"a.jsonl: a weight of 2 repeats records, and --drop-duplicates"):
        prepare([f"{data}=2"], str(target), tmp_path / "x", drop_duplicates=True, show=False)


def test_a_mixture_by_weights(tmp_path: Path, target: Path) -> None:
    one = write(tmp_path / "one.jsonl", [talk(f"Question {n}", "One") for n in range(40)])
    two = write(tmp_path / "two.jsonl", [talk(f"Question {n}", "Two") for n in range(5)])
    mixture = [f"{one}=0.25", f"{two}=2"]

    def prepared(name: str, data: list[str]) -> dict[str, Any]:
        return prepare(data, str(target), tmp_path / name, show=False, num_proc=1)

    summary = prepared("rows", mixture)
    found = [texts[0] for texts in answers(tmp_path / "rows", target)]
    assert 8 <= found.count("One<|im_end|>") <= 12
    assert found.count("Two<|im_end|>") == 10
    assert summary["counts"]["left_out"] == 40 - found.count("One<|im_end|>")
    assert summary["counts"]["repeated"] == 5
    assert [source.get("weight") for source in summary["inputs"]] == [0.25, 2.0]
    assert prepared("again", mixture)["rows_digest"] == summary["rows_digest"]
    with pytest.raises(UserError, match="the input files differ"):
        prepared("rows", [str(one), f"{two}=2"])


def test_template_arguments_change_the_prompt_and_are_recorded(tmp_path: Path, byte_level: Any) -> None:
    tokenizer = byte_level("chatml")
    tokenizer.chat_template += (
        "{% if add_generation_prompt and enable_thinking is defined and enable_thinking is false %}"
        "{{ '<think>\n\n</think>\n\n' }}{% endif %}"
    )
    target = tmp_path / "target"
    target_with(target, tokenizer)
    data = write(tmp_path / "a.jsonl", [talk("Hi", "Hello")])
    plain = make(data, target, tmp_path / "plain")
    made = make(data, target, tmp_path / "rows", template_arguments={"enable_thinking": False})
    assert answers(tmp_path / "rows", target) == answers(tmp_path / "plain", target) == [["Hello<|im_end|>"]]
    row = open_rows(tmp_path / "rows").dataset[0]
    prompt = tokenizer.decode(row["input_ids"][: row["spans"][0][0]])
    assert prompt.endswith("<|im_start|>assistant\n<think>\n\n</think>\n\n")
    assert made["template_arguments"] == {"enable_thinking": False}
    assert plain["template_arguments"] == {}
    with pytest.raises(UserError, match="template_arguments"):
        make(data, target, tmp_path / "rows")


def test_rows_of_before_these_settings_are_the_same_rows(tmp_path: Path, target: Path) -> None:
    data = write(tmp_path / "a.jsonl", [talk("Hi", "Hello")])
    make(data, target, tmp_path / "rows")
    file = tmp_path / "rows" / "rows.json"
    info = json.loads(file.read_text())
    for name in ("template_arguments", "last_turn_only", "drop_duplicates"):
        del info[name]
    file.write_text(json.dumps(info))
    assert make(data, target, tmp_path / "rows")["reused"]
    with pytest.raises(UserError, match="drop_duplicates False there, True now"):
        make(data, target, tmp_path / "rows", drop_duplicates=True)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("enable_thinking", "wanted NAME=VALUE"),
        ("=1", "wanted NAME=VALUE"),
        ("a b=1", "wanted NAME=VALUE"),
        ("messages=[]", "messages is given by eagle itself"),
    ],
)
def test_template_arguments_that_are_none(text: str, told: str) -> None:
    with pytest.raises(UserError, match=told):
        parse_arguments([text])


def test_values_of_template_arguments() -> None:
    given = ["a=false", "b=3", "c=low", 'd={"e": 1}', "f=", "g=x=y"]
    assert parse_arguments(given) == {"a": False, "b": 3, "c": "low", "d": {"e": 1}, "f": "", "g": "x=y"}


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


def test_a_file_whose_name_is_no_text(tmp_path: Path, target: Path) -> None:
    data = write(tmp_path / os.fsdecode(b"a\xff.jsonl"), [talk("Hi", "Hello")])
    summary = make(data, target, tmp_path / "rows")
    assert open_rows(tmp_path / "rows").dataset["source"][:] == ["a\ufffd.jsonl#1"]
    assert summary["inputs"][0]["name"] == "a\ufffd.jsonl"
