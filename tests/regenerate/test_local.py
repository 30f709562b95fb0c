"""Answers made in process: the whole call, resumed, shared out, and read again by prepare."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from eagle_cli.main import main
from eagle_train import distributed
from eagle_train.data.prepare import prepare
from eagle_train.data.rows import open_rows
from eagle_train.decoding.loop import Settings, plain
from eagle_train.errors import UserError
from eagle_train.regenerate.answers import AnswerSettings
from eagle_train.regenerate.output import lines_of
from eagle_train.regenerate.regenerate import regenerate
from eagle_train.regenerate.work import folder_of
from eagle_train.targets.load import Target

from .asking import STOPS, chats, command, kill_after, read, write

SETTINGS = AnswerSettings(max_new_tokens=24)
HOW = ("--max-new-tokens", "24", "--dtype", "fp32", "--device", "cpu", "--batch", "4")  # as `make` does


def make(data: Path, target: Target | Path, out: Path, **options: Any) -> dict[str, Any]:
    how = {"settings": SETTINGS, "num_slots": 4, "device": "cpu", "dtype": "fp32", **options}
    return regenerate([str(data)], target, out, show=False, **how)


def one_by_one(target: Target, record: dict[str, Any]) -> list[dict[str, Any]]:
    """The naive twin: every turn on the new history, each prompt alone."""
    tokenizer = target.tokenizer
    messages: list[dict[str, Any]] = []
    for message in record["messages"]:
        if message["role"] == "assistant":
            continue
        messages.append(message)
        if message["role"] == "user":
            shown = [{"role": m["role"], "content": m["content"]} for m in messages]
            text = tokenizer.apply_chat_template(shown, tokenize=False, add_generation_prompt=True)
            prompt = tokenizer(text, add_special_tokens=False)["input_ids"]
            ids = plain(target, prompt, Settings(SETTINGS.max_new_tokens, eos_ids=tuple(STOPS))).ids
            finished = ids[-1] in STOPS
            content = tokenizer.decode(ids[:-1] if finished else ids)
            answer = {"role": "assistant", "content": content, "answer_ids": ids, "finished": finished}
            if not content.strip():
                return messages[:-1]
            messages.append(answer)
    return messages


@pytest.fixture(scope="module")
def expected(target: Target) -> list[dict[str, Any]]:
    found = [{"id": record["id"], "messages": one_by_one(target, record)} for record in chats()]
    return [record for record in found if record["messages"]]


def shown(out: Path) -> list[dict[str, Any]]:
    return [{"id": line["id"], "messages": line["messages"]} for line in read(out)]


def test_answers_equal_plain_decoding_turn_by_turn_in_order(
    tmp_path: Path, target: Target, expected: list[dict[str, Any]]
) -> None:
    data = write(tmp_path / "a.jsonl", chats())
    report = make(data, target, tmp_path / "out.jsonl")
    assert shown(tmp_path / "out.jsonl") == expected
    answers = [m for record in expected for m in record["messages"] if m["role"] == "assistant"]
    assert {answer["finished"] for answer in answers} == {True, False}
    assert max(len(record["messages"]) for record in expected) >= 6
    assert report["conversations"] == len(expected)
    assert report["answers"] == len(answers)
    assert report["unfinished"] == sum(not answer["finished"] for answer in answers)
    assert report["answer_tokens"] == sum(len(answer["answer_ids"]) for answer in answers)
    assert (report["failed"], report["reused"], report["complete"]) == (0, False, True)
    made_by = read(tmp_path / "out.jsonl")[0]["generated_by"]
    assert made_by == report["generated_by"]
    assert made_by["fingerprint"] == target.fingerprint
    assert made_by["dtype"] == "fp32"
    assert (made_by["temperature"], made_by["max_new_tokens"], made_by["thinking"]) == (0.0, 24, "kept")
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "a.jsonl",
        "out.jsonl",
        "out.jsonl.report.json",
    ]


def test_a_second_time_nothing_is_done(
    tmp_path: Path, target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = write(tmp_path / "a.jsonl", chats(4))
    first = make(data, target, tmp_path / "out.jsonl")
    before = (tmp_path / "out.jsonl").read_bytes()
    monkeypatch.setattr("eagle_train.regenerate.local.decode", None)
    assert make(data, target, tmp_path / "out.jsonl") == {**first, "reused": True}
    assert (tmp_path / "out.jsonl").read_bytes() == before


def test_another_setting_model_or_input_into_the_same_output_is_refused(
    tmp_path: Path, target: Target, make_tiny_target: Any
) -> None:
    data = write(tmp_path / "a.jsonl", chats(2))
    make(data, target, tmp_path / "out.jsonl")
    before = (tmp_path / "out.jsonl").read_bytes()
    with pytest.raises(UserError, match="max_new_tokens 24 there, 5 now; give another --out"):
        make(data, target, tmp_path / "out.jsonl", settings=AnswerSettings(max_new_tokens=5))
    other = make_tiny_target(tmp_path / "other", seed=3, num_layers=4)
    with pytest.raises(UserError, match=r"fingerprint .* there, .* now"):
        make(data, other, tmp_path / "out.jsonl")
    with pytest.raises(UserError, match="template_fingerprint"):
        make(data, target, tmp_path / "out.jsonl", chat_template="vicuna")
    with pytest.raises(UserError, match="the input differs"):
        make(write(tmp_path / "b.jsonl", chats(3)), target, tmp_path / "out.jsonl")
    assert (tmp_path / "out.jsonl").read_bytes() == before


def test_a_file_of_something_else_is_never_replaced(tmp_path: Path, target: Target) -> None:
    mine = tmp_path / "mine.jsonl"
    mine.write_text("years of work")
    with pytest.raises(UserError, match="not made by eagle regenerate"):
        make(write(tmp_path / "a.jsonl", chats(1)), target, mine)
    assert mine.read_text() == "years of work"


@pytest.mark.parametrize("after", [0, 1, 7, 25])
def test_an_interrupted_run_goes_on_where_it_was(
    tmp_path: Path,
    target: Target,
    expected: list[dict[str, Any]],
    monkeypatch: pytest.MonkeyPatch,
    after: int,
) -> None:
    from eagle_train.regenerate import local
    from eagle_train.regenerate.work import Work

    data = write(tmp_path / "a.jsonl", chats())
    put, done = Work.put, []

    def interrupted(self: Work, key: Any, answer: Any) -> None:
        if len(done) == after:
            raise KeyboardInterrupt
        done.append(key)
        put(self, key, answer)

    monkeypatch.setattr(Work, "put", interrupted)
    with pytest.raises(KeyboardInterrupt):
        make(data, target, tmp_path / "out.jsonl")
    assert not (tmp_path / "out.jsonl").exists()
    monkeypatch.setattr(Work, "put", put)
    asked: list[int] = []
    decode = local.decode
    monkeypatch.setattr(
        local, "decode", lambda target, jobs, *more: asked.append(len(jobs)) or decode(target, jobs, *more)
    )
    make(data, target, tmp_path / "out.jsonl", num_slots=3)
    assert shown(tmp_path / "out.jsonl") == expected
    total = sum(m["role"] == "assistant" for record in expected for m in record["messages"])
    assert total - after <= sum(asked) <= total - after + len(chats()), "finished answers are not made again"


def test_ranks_share_the_work_and_the_last_one_writes(
    tmp_path: Path, target: Target, expected: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    data = write(tmp_path / "a.jsonl", chats())
    monkeypatch.setenv("WORLD_SIZE", "3")
    for rank in ("2", "0"):
        monkeypatch.setenv("RANK", rank)
        assert make(data, target, tmp_path / "out.jsonl") == {"reused": False, "complete": False}
        assert not (tmp_path / "out.jsonl").exists()
    monkeypatch.setenv("RANK", "1")
    assert make(data, target, tmp_path / "out.jsonl")["complete"]
    assert shown(tmp_path / "out.jsonl") == expected


def test_failures_are_listed_bounded_and_tried_again(tmp_path: Path, target: Target) -> None:
    records = chats(5)
    records[2]["messages"] = [{"role": "user", "content": "too long " * 400}]
    records[3]["messages"] = [
        *({"role": "user", "content": "Hi"}, {"role": "assistant", "content": "x"}),
        {"role": "user", "content": "too long " * 400},
    ]
    data = write(tmp_path / "a.jsonl", records)
    with pytest.raises(
        UserError, match=r"1 answer failed, more than --max-failures 0; .*a.jsonl#3:c2, turn 1"
    ):
        make(data, target, tmp_path / "out.jsonl", max_failures=0)
    assert not (tmp_path / "out.jsonl").exists()
    report = make(data, target, tmp_path / "out.jsonl", max_failures=2)
    assert report["failed"] == 2
    assert [(f["source"], f["turn"]) for f in report["failures"]] == [
        ("a.jsonl#3:c2", 1),
        ("a.jsonl#4:c3", 2),
    ]
    assert "tokens, room for 512" in report["failures"][0]["reason"]
    lines = {line["id"]: line for line in read(tmp_path / "out.jsonl")}
    assert "c2" not in lines
    assert [m["role"] for m in lines["c3"]["messages"]] == ["user", "assistant"]
    again = make(data, target, tmp_path / "out.jsonl", max_failures=2)
    assert not again["reused"]
    assert again == report


def test_sampled_answers_depend_on_the_seed_alone(tmp_path: Path, target: Target) -> None:
    data = write(tmp_path / "a.jsonl", chats(8))

    def sampled(name: str, seed: int, num_slots: int) -> list[dict[str, Any]]:
        settings = AnswerSettings(temperature=1.0, top_p=0.9, max_new_tokens=12, seed=seed)
        make(data, target, tmp_path / name, settings=settings, num_slots=num_slots)
        return shown(tmp_path / name)

    assert sampled("one", 0, 1) == sampled("eight", 0, 8) != sampled("other", 1, 8)
    assert read(tmp_path / "one")[0]["generated_by"]["seed"] == 0


def test_prepare_takes_the_answers_by_their_ids(
    tmp_path: Path, target: Target, ending_target_dir: Path
) -> None:
    data = write(tmp_path / "a.jsonl", chats())
    make(data, target, tmp_path / "out.jsonl.gz")
    lines = [
        json.loads(line) for line in gzip.decompress((tmp_path / "out.jsonl.gz").read_bytes()).splitlines()
    ]
    prepare(
        [str(tmp_path / "out.jsonl.gz")], str(ending_target_dir), tmp_path / "rows", show=False, num_proc=1
    )
    rows = open_rows(tmp_path / "rows")
    assert rows.info["counts"]["kept"] == len(lines)
    found = [row["input_ids"][first : last + 1] for row in rows.dataset for first, last in row["spans"]]
    wanted = [m["answer_ids"] for line in lines for m in line["messages"] if m["role"] == "assistant"]
    assert found == wanted
    assert not [kind for kind in rows.info["counts"]["repaired"] if "answer ids" in kind]


def test_thoughts_kept_or_stripped(tmp_path: Path, target: Target) -> None:
    """The template opens a thought; the tiny model never closes it."""
    template = tmp_path / "thinking.jinja"
    template.write_text(
        target.tokenizer.chat_template.replace(
            "<|im_start|>assistant\n' }}", "<|im_start|>assistant\n<think>\n' }}"
        )
    )
    data = write(tmp_path / "a.jsonl", chats(3))
    kept = make(data, target, tmp_path / "kept.jsonl", chat_template=str(template))
    assert kept["answers"] > 0
    settings = AnswerSettings(max_new_tokens=24, keep_thinking=False)
    with pytest.raises(UserError, match=r"stripped.jsonl: not written: all 3 answers are empty; remove"):
        make(data, target, tmp_path / "stripped.jsonl", chat_template=str(template), settings=settings)
    assert not (tmp_path / "stripped.jsonl").exists()


@pytest.mark.parametrize(
    ("records", "told"),
    [
        ([], "no prompt in 0 records"),
        ([{"messages": []}, {"nothing": 1}], "no prompt in 2 records .*empty conversation: 1"),
    ],
)
def test_nothing_to_ask(tmp_path: Path, target: Target, records: list[Any], told: str) -> None:
    with pytest.raises(UserError, match=told):
        make(write(tmp_path / "a.jsonl", records), target, tmp_path / "out.jsonl")
    assert [path.name for path in tmp_path.iterdir()] == ["a.jsonl"]


def test_killed_at_any_moment_and_given_again(
    tmp_path: Path, target: Target, ending_target_dir: Path, expected: list[dict[str, Any]]
) -> None:
    """A real process, killed without a word once it has written some answers."""
    data = write(tmp_path / "a.jsonl", chats())
    out = tmp_path / "out.jsonl"
    part = folder_of(out) / "part-00000.jsonl"
    kill_after(3, command(data, ending_target_dir, out, *HOW), part)
    assert not out.exists()
    make(data, ending_target_dir, out)
    assert shown(out) == expected


def test_the_command_starts_workers_with_what_was_typed(
    tmp_path: Path,
    ending_target_dir: Path,
    expected: list[dict[str, Any]],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Each worker's command line is run here, one after the other, as the ranks of a launch."""
    data = write(tmp_path / "a.jsonl", chats())
    out = tmp_path / "out.jsonl"
    launched: list[list[str]] = []

    def in_turn(processes: int, arguments: list[str]) -> None:
        launched.append(arguments)
        for rank in range(processes):
            with pytest.MonkeyPatch.context() as patch, pytest.raises(SystemExit) as left:
                patch.setenv("RANK", str(rank))
                patch.setenv("WORLD_SIZE", str(processes))
                main(arguments)
            assert not left.value.code

    monkeypatch.setattr(distributed, "relaunch", in_turn)
    with pytest.raises(SystemExit) as left:
        main([*command(data, ending_target_dir, out, *HOW)[3:], "--processes", "2", "--template-arg", "a=b"])
    assert not left.value.code
    (typed,) = launched
    assert (typed[:2], typed[-1]) == (["regenerate", str(data)], "--worker")
    for option, value in (("--max-new-tokens", "24"), ("--batch", "4"), ("--template-arg", "a=b")):
        assert typed[typed.index(option) + 1] == value
    assert "--processes" not in typed
    assert shown(out) == expected
    said = capsys.readouterr().out.splitlines()
    answers = sum(m["role"] == "assistant" for record in expected for m in record["messages"])
    assert said[0].startswith(f"{len(expected)} conversations, {answers} answers (")
    assert said[-1] == f"next: eagle prepare {out} --target {ending_target_dir} --out rows/"
    assert sum(" conversations, " in line for line in said) == 1, "the workers print nothing"


def test_tools_and_arguments_reach_the_prompt_and_tools_the_output(
    tmp_path: Path, target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    from eagle_train.regenerate import local

    template = tmp_path / "tools.jinja"
    template.write_text("{{ mood }} {{ tools | tojson }} " + str(target.tokenizer.chat_template))
    prompts: list[str] = []
    decode = local.decode

    def watched(target: Target, jobs: Any, *more: Any) -> Any:
        prompts.extend(target.tokenizer.decode(job.prompt) for job in jobs)
        return decode(target, jobs, *more)

    monkeypatch.setattr(local, "decode", watched)
    tools = [{"type": "function", "function": {"name": "weather"}}]
    data = write(tmp_path / "a.jsonl", [{**chats(1)[0], "tools": tools}])
    make(
        data, target, tmp_path / "out.jsonl", chat_template=str(template), template_arguments={"mood": "calm"}
    )
    assert prompts[0].startswith('calm [{"type": "function", "function": {"name": "weather"}}] <|im_start|>')
    (line,) = read(tmp_path / "out.jsonl")
    assert line["tools"] == tools
    assert line["generated_by"]["template_arguments"] == {"mood": "calm"}


def test_what_was_left_out_is_named(tmp_path: Path, target: Target) -> None:
    data = write(tmp_path / "a.jsonl", [*chats(1), {"messages": []}, {"nothing": 1}, *chats(1)])
    data.write_text(data.read_text() + '{"messages": [')
    with pytest.raises(UserError, match=r"a\.jsonl:5 \(record 5\): not valid JSON.*--skip-bad"):
        make(data, target, tmp_path / "out.jsonl")
    report = make(data, target, tmp_path / "out.jsonl", skip_bad=True)
    assert [line["row_id"][-2:] for line in read(tmp_path / "out.jsonl")] == ["-0", "-1"]
    said = list(lines_of(report))
    assert said[0].startswith("2 conversations, 2 answers")
    assert said[1:] == [
        "  skipped        1  empty conversation (first a.jsonl#2)",
        "  skipped        1  no conversation in the record (first a.jsonl#3)",
        f"  damaged        1  records; the first at {data}:5 (record 5)",
    ]


def test_a_conversation_keeps_its_category(tmp_path: Path, target: Target) -> None:
    first, second = chats(2)
    data = write(tmp_path / "a.jsonl", [{**first, "category": "sea"}, second])
    make(data, target, tmp_path / "out.jsonl")
    lines = read(tmp_path / "out.jsonl")
    assert lines[0]["category"] == "sea"
    assert "category" not in lines[1]
