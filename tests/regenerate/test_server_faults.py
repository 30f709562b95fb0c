"""A server that fails now and then, answers oddly, or dies: waited for, listed, bounded, named."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from eagle_cli.main import main
from eagle_train.errors import UserError
from eagle_train.regenerate import server as module
from eagle_train.regenerate.server import Server

from .asking import chats, read, shown, write
from .chat_server import ODD
from .serving import NO_MODEL, Start, expected, make


def asking(*texts: str) -> list[dict[str, Any]]:
    return [{"id": text, "messages": [{"role": "user", "content": text}]} for text in texts]


def test_faults_that_pass_are_waited_for(tmp_path: Path, start_server: Start) -> None:
    url, log = start_server("--faults", "--delay", "0.005")
    data = write(tmp_path / "a.jsonl", chats(30))
    report = make(data, NO_MODEL, tmp_path / "out.jsonl", Server(url + "/v1/", in_flight=8, tries=12))
    assert shown(tmp_path / "out.jsonl") == expected(chats(30))
    assert report["failed"] == 0
    assert report["answer_tokens"] == 0, "without the tokenizer no ids are asked for"
    assert "return_token_ids" not in read(log)[0]["body"]
    assert len(read(log)) > 1.5 * report["answers"]


def test_failures_are_listed_and_bounded(tmp_path: Path, start_server: Start) -> None:
    url, log = start_server()
    records = chats(12)
    records[4]["messages"][0]["content"] = "FAIL"
    records[6]["messages"] = [
        *({"role": "user", "content": "Hi"}, {"role": "assistant", "content": "x"}),
        {"role": "user", "content": "FAIL"},
    ]
    data = write(tmp_path / "a.jsonl", records)
    with pytest.raises(UserError, match=r"2 answers failed, more than --max-failures 1.*not to my taste"):
        make(data, NO_MODEL, tmp_path / "out.jsonl", Server(url, in_flight=1), max_failures=1)
    assert not (tmp_path / "out.jsonl").exists()
    report = make(data, NO_MODEL, tmp_path / "out.jsonl", Server(url), max_failures=2)
    assert sorted((failure["source"], failure["turn"]) for failure in report["failures"]) == [
        ("a.jsonl#5:c4", 1),
        ("a.jsonl#7:c6", 2),
    ]
    assert all("status 400" in failure["reason"] for failure in report["failures"])
    lines = {line["id"]: line for line in read(tmp_path / "out.jsonl")}
    assert "c4" not in lines
    assert len(lines["c6"]["messages"]) == 2
    before = len(read(log))
    again = make(data, NO_MODEL, tmp_path / "out.jsonl", Server(url), max_failures=2)
    assert again == report
    assert len(read(log)) == before + 2, "only the failed ones are asked again"


def test_an_odd_reply_is_a_failed_answer(tmp_path: Path, start_server: Start) -> None:
    url, _ = start_server()
    records = asking("Hi", *(f"ODD {name}" for name in ODD), "Bye")
    data = write(tmp_path / "a.jsonl", records)
    report = make(data, NO_MODEL, tmp_path / "out.jsonl", Server(url, tries=1))
    reasons = {failure["source"].split(":ODD ")[1]: failure["reason"] for failure in report["failures"]}
    assert list(reasons) == list(ODD)
    assert all(len(reason) < 300 and "\n" not in reason for reason in reasons.values()), reasons
    assert "finish_reason ['stop']" in reasons["reason is a list"]
    assert "nested too deeply" in reasons["nested"]
    assert reasons["not packed"].startswith("DecodingError")
    assert reasons["rot13"] == "status 400: no"
    assert shown(tmp_path / "out.jsonl") == expected(asking("Hi", "Bye"))


def test_a_reply_that_never_ends_is_given_up(tmp_path: Path, start_server: Start) -> None:
    """Every piece of it comes in time; the whole does not."""
    url, log = start_server()
    data = write(tmp_path / "a.jsonl", asking("DRIP", "Hi"))
    begun = time.monotonic()
    report = make(data, NO_MODEL, tmp_path / "out.jsonl", Server(url, tries=2, timeout=0.3))
    assert time.monotonic() - begun < 5
    (failure,) = report["failures"]
    assert failure["reason"] == "no whole reply in 0.3 seconds (after 2 tries)"
    assert len(read(log)) == 3
    assert shown(tmp_path / "out.jsonl") == expected(asking("Hi"))


@pytest.mark.parametrize("ids", ["[5, 6, 2]", '"abc"', "[-1]", "[99999999]", "[true]"])
def test_ids_that_are_not_tokens_of_the_text_are_dropped(
    tmp_path: Path,
    start_server: Start,
    ending_target_dir: Path,
    ids: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    url, _ = start_server("--ids", ids if ids.startswith("[") else f"[{ids}]")
    data = write(tmp_path / "a.jsonl", chats(9))
    report = make(data, ending_target_dir, tmp_path / "out.jsonl", Server(url))
    assert shown(tmp_path / "out.jsonl") == expected(chats(9))
    assert report["answer_tokens"] == 0
    lines = capsys.readouterr().err.strip().splitlines()
    assert lines[-1].startswith(f"{report['answers']} answers are kept as text: the token ids")


@pytest.mark.parametrize("records", [asking("FAIL"), asking("FAIL", "FAIL 2")])
def test_no_answer_at_all_is_an_error(
    tmp_path: Path,
    start_server: Start,
    records: list[dict[str, Any]],
    capsys: pytest.CaptureFixture[str],
) -> None:
    url, _ = start_server()
    data, out = write(tmp_path / "a.jsonl", records), tmp_path / "out.jsonl"
    with pytest.raises(SystemExit) as left:
        main(["regenerate", str(data), "--target", NO_MODEL, "--server", url, "--out", str(out)])
    assert left.value.code == 2
    said = capsys.readouterr()
    told = f"error: {out}: not written: no answer was made, {len(records)} failed"
    assert said.err.strip().splitlines()[-1].startswith(told)
    assert not said.out
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.jsonl", "out.jsonl.work", "server-0.log"]


def test_a_list_of_models_that_is_none_or_long(tmp_path: Path, start_server: Start) -> None:
    data = write(tmp_path / "a.jsonl", chats(1))
    nested, _ = start_server("--models", "nested")
    many, _ = start_server("--models", ",".join(f"model-{i}" for i in range(5000)))
    for url, told in [
        (nested, "gives no list of models .the reply is nested too deeply.; start the server"),
        (many, "serves model-0, model-1, model-2, model-3, model-4 and 4,995 more, wanted"),
    ]:
        with pytest.raises(UserError, match=told) as raised:
            make(data, NO_MODEL, tmp_path / "out.jsonl", Server(url))
        assert len(str(raised.value)) < 400


def test_a_server_that_dies_stops_the_run_with_one_line(tmp_path: Path, start_server: Start) -> None:
    url, _ = start_server()
    served = Server(url, in_flight=4, tries=2, timeout=2)
    real = module.ServerAnswers.run

    def run_against_nobody(self: Any, *arguments: Any) -> None:
        object.__setattr__(self.server, "url", "http://127.0.0.1:9")
        real(self, *arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module.ServerAnswers, "run", run_against_nobody)
        with pytest.raises(UserError, match=r"3 answers failed, more than --max-failures 2; .*after 2 tries"):
            make(
                write(tmp_path / "a.jsonl", chats(9)),
                NO_MODEL,
                tmp_path / "out.jsonl",
                served,
                max_failures=2,
            )
    again = make(tmp_path / "a.jsonl", NO_MODEL, tmp_path / "out.jsonl", Server(url))
    assert again["failed"] == 0
    assert shown(tmp_path / "out.jsonl") == expected(chats(9))
