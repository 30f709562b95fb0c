"""Answers made by a server: a real process on loopback that answers out of order and fails now and then."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from eagle_cli.main import main
from eagle_train.errors import UserError
from eagle_train.regenerate import server as module
from eagle_train.regenerate.answers import AnswerSettings
from eagle_train.regenerate.regenerate import regenerate
from eagle_train.regenerate.server import Server
from eagle_train.regenerate.work import folder_of

from .asking import chats, command, kill_after, read, write
from .chat_server import ODD, reply, token_ids

Start = Callable[..., tuple[str, Path]]
HOW = ("--max-new-tokens", "50", "--in-flight", "4")
NO_MODEL = "./served-elsewhere"  # there is no tokenizer of that name


@pytest.fixture(autouse=True)
def _short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_FIRST_PAUSE", 0.01)


def make(data: Path, target: Path | str, out: Path, server: Server, **options: Any) -> dict[str, Any]:
    settings = options.pop("settings", AnswerSettings(max_new_tokens=50))
    return regenerate([str(data)], str(target), out, settings=settings, server=server, show=False, **options)


def expected(records: list[dict[str, Any]], target: Path | None = None) -> list[dict[str, Any]]:
    """What the server says, turn by turn on the new history, in the order of the input."""
    tokenizer = Tokenizer.from_file(str(target / "tokenizer.json")) if target else None
    found = []
    for record in records:
        messages: list[dict[str, Any]] = []
        for message in record["messages"]:
            if message["role"] == "assistant":
                continue
            messages.append(message)
            if message["role"] == "user":
                text, finished = reply(messages)
                with_ids = {"answer_ids": token_ids(text, finished, tokenizer)} if tokenizer else {}
                messages.append({"role": "assistant", "content": text, **with_ids, "finished": finished})
        found.append({"id": record["id"], "messages": messages})
    return found


def shown(out: Path) -> list[dict[str, Any]]:
    return [{"id": line["id"], "messages": line["messages"]} for line in read(out)]


def test_many_conversations_at_once_turn_by_turn_in_order(
    tmp_path: Path, start_server: Start, ending_target_dir: Path
) -> None:
    ids = ("--ids", str(ending_target_dir / "tokenizer.json"))
    url, log = start_server("--delay", "0.02", "--gather", "30", *ids)
    data = write(tmp_path / "a.jsonl", chats(60))
    report = make(data, ending_target_dir, tmp_path / "out.jsonl", Server(url, in_flight=40))
    wanted = expected(chats(60), ending_target_dir)
    assert shown(tmp_path / "out.jsonl") == wanted
    answers = [m for record in wanted for m in record["messages"] if m["role"] == "assistant"]
    assert report["unfinished"] == sum(not answer["finished"] for answer in answers) > 0
    assert report["answer_tokens"] == sum(len(answer["answer_ids"]) for answer in answers)
    requests = read(log)
    assert len(requests) == len(answers) == report["answers"]
    assert max(request["running"] for request in requests) >= 30
    body = requests[0]["body"]
    assert (requests[0]["path"], body["model"], body["max_tokens"]) == ("/v1/chat/completions", "tiny", 50)
    assert body["temperature"] == 0
    assert "seed" not in body
    made_by = read(tmp_path / "out.jsonl")[0]["generated_by"]
    assert (made_by["model"], made_by["server"]) == ("tiny", "openai-compatible")
    assert made_by["tokenizer_fingerprint"]
    again = make(data, ending_target_dir, tmp_path / "out.jsonl", Server(url))
    assert again == {**report, "reused": True}
    assert len(read(log)) == len(requests)


def test_faults_that_pass_are_waited_for(tmp_path: Path, start_server: Start) -> None:
    url, log = start_server("--faults", "--delay", "0.005")
    data = write(tmp_path / "a.jsonl", chats(30))
    report = make(data, NO_MODEL, tmp_path / "out.jsonl", Server(url + "/v1/", in_flight=8, tries=12))
    assert shown(tmp_path / "out.jsonl") == expected(chats(30))
    assert report["failed"] == 0
    assert report["answer_tokens"] == 0, "without the tokenizer no ids are asked for"
    assert "return_token_ids" not in read(log)[0]["body"]
    assert len(read(log)) > 1.5 * report["answers"]


def test_settings_reach_the_server(
    tmp_path: Path, start_server: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    url, log = start_server("--models", "other,tiny")
    monkeypatch.setenv("MY_KEY", "secret")
    records = [{**chats(1)[0], "tools": [{"type": "function", "function": {"name": "f"}}]}, *chats(3)[1:]]
    how = AnswerSettings(temperature=0.5, top_p=0.9, max_new_tokens=7, seed=3)
    make(
        write(tmp_path / "a.jsonl", records),
        NO_MODEL,
        tmp_path / "out.jsonl",
        Server(url, model="tiny", api_key_env="MY_KEY"),
        settings=how,
        template_arguments={"enable_thinking": False},
    )
    requests = read(log)
    bodies = [request["body"] for request in requests]
    assert {request["key"] for request in requests} == {"Bearer secret"}
    assert {(body["model"], body["temperature"], body["top_p"], body["max_tokens"]) for body in bodies} == {
        ("tiny", 0.5, 0.9, 7)
    }
    assert len({body["seed"] for body in bodies}) == len(bodies)
    assert all(body["chat_template_kwargs"] == {"enable_thinking": False} for body in bodies)
    assert [body["tools"] for body in bodies if "tools" in body] == [records[0]["tools"]]
    made_by = read(tmp_path / "out.jsonl")[0]["generated_by"]
    assert (made_by["seed"], made_by["template_arguments"]) == (3, {"enable_thinking": False})
    assert read(tmp_path / "out.jsonl")[0]["tools"] == records[0]["tools"]


def test_a_server_that_knows_no_token_ids(
    tmp_path: Path, start_server: Start, ending_target_dir: Path
) -> None:
    url, log = start_server("--strict")
    data = write(tmp_path / "a.jsonl", chats(9))
    report = make(data, ending_target_dir, tmp_path / "out.jsonl", Server(url, in_flight=2))
    assert report["failed"] == 0
    assert shown(tmp_path / "out.jsonl") == expected(chats(9))
    asking = [request for request in read(log) if "return_token_ids" in request["body"]]
    assert 1 <= len(asking) <= 2


@pytest.mark.parametrize("place", ["field", "text"])
def test_thinking(tmp_path: Path, start_server: Start, place: str) -> None:
    url, _ = start_server("--thinking", place)
    record = {"id": "a", "messages": [{"role": "user", "content": "Hi"}]}
    data = write(tmp_path / "a.jsonl", [record])
    text, finished = reply(record["messages"])  # type: ignore[arg-type]
    make(data, NO_MODEL, tmp_path / "kept", Server(url))
    make(data, NO_MODEL, tmp_path / "stripped", Server(url), settings=AnswerSettings(keep_thinking=False))
    (kept,), (stripped,) = read(tmp_path / "kept"), read(tmp_path / "stripped")
    assert stripped["messages"][1] == {"role": "assistant", "content": text, "finished": finished}
    thought = (
        {"content": text, "reasoning_content": "Hm."}
        if place == "field"
        else {"content": f"<think>\nHm.\n</think>\n\n{text}"}
    )
    assert kept["messages"][1] == {"role": "assistant", **thought, "finished": finished}


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


def asking(*texts: str) -> list[dict[str, Any]]:
    return [{"id": text, "messages": [{"role": "user", "content": text}]} for text in texts]


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


def test_urls_and_models_that_lead_nowhere(tmp_path: Path, start_server: Start) -> None:
    data = write(tmp_path / "a.jsonl", chats(1))
    url, _ = start_server("--models", "tiny-a,tiny-b")
    for server, told in [
        (Server("http://127.0.0.1:9", tries=1), "gives no list of models .*start the server"),
        (Server(url), f"serves tiny-a, tiny-b, wanted {NO_MODEL}; name one with --served-model"),
        (Server(url, model="tinya"), "wanted tinya; .*did you mean 'tiny-a'"),
    ]:
        with pytest.raises(UserError, match=told):
            make(data, NO_MODEL, tmp_path / "out.jsonl", server)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.jsonl", "server-0.log"]


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"url": "localhost:8000"}, "--server localhost:8000: wanted a URL such as"),
        ({"url": "foo"}, "--server foo: wanted a URL"),
        ({"url": "htp://x"}, "--server htp://x: wanted a URL"),
        ({"url": ""}, "--server '': wanted a URL"),
        ({"url": "http:///v1"}, "--server http:///v1: wanted a URL"),
        ({"url": "http://a b"}, "--server 'http://a b': wanted a URL"),
        ({"url": "http://x:99999"}, "wanted a URL"),
        ({"url": "http://[::1"}, "wanted a URL"),
        ({"url": "http://x:8000/v1?key=1"}, "wanted a URL"),
        ({"in_flight": 0}, "--in-flight 0"),
        ({"tries": 0}, "--tries 0"),
        ({"timeout": 0.0}, "--timeout 0"),
    ],
)
def test_servers_that_make_no_sense(given: dict[str, Any], told: str) -> None:
    with pytest.raises(UserError, match=told):
        Server(**{"url": "http://localhost", **given})


def test_a_key_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no such environment variable"):
        Server("http://localhost", api_key_env="EAGLE_NO_SUCH_KEY").headers()


def test_killed_and_given_again(tmp_path: Path, start_server: Start) -> None:
    """A real process, killed without a word in the middle; the answers it had are not asked for again."""
    url, log = start_server("--delay", "0.02")
    data = write(tmp_path / "a.jsonl", chats(60))
    out = tmp_path / "out.jsonl"
    part = folder_of(out) / "part-00000.jsonl"
    kill_after(10, command(data, NO_MODEL, out, "--server", url, *HOW), part)
    assert not out.exists()
    had, before = part.read_bytes().count(b"\n"), len(read(log))
    report = make(data, NO_MODEL, out, Server(url, in_flight=4))
    wanted = expected(chats(60))
    assert shown(out) == wanted
    total = sum(m["role"] == "assistant" for record in wanted for m in record["messages"])
    assert len(read(log)) - before == total - had
    assert report["answers"] == total


def test_errors_of_the_command_are_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = write(tmp_path / "a.jsonl", chats(1))
    for more, told in [
        (["--thinking", "stripped"], "--thinking stripped: wanted keep or strip; did you mean 'strip'?"),
        (["--temperature", "-1"], "temperature: got -1.0, wanted 0"),
        (["--server", "localhost"], "--server localhost: wanted a URL"),
        (["--template-arg", "x"], "--template-arg x: wanted NAME=VALUE"),
        ([], "./none: no such directory"),
    ]:
        with pytest.raises(SystemExit) as left:
            main(["regenerate", str(data), "--target", "./none", "--out", str(tmp_path / "o"), *more])
        assert left.value.code == 2
        assert capsys.readouterr().err.strip().splitlines()[-1].startswith(f"error: {told}")
    assert list(tmp_path.iterdir()) == [data]
