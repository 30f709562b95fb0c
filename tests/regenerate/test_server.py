"""Answers made by a server: a real process on loopback that answers out of order."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from eagle_cli.main import main
from eagle_train.errors import UserError
from eagle_train.regenerate.answers import AnswerSettings
from eagle_train.regenerate.server import Server
from eagle_train.regenerate.work import folder_of

from .asking import chats, command, kill_after, read, shown, write
from .chat_server import reply
from .serving import HOW, NO_MODEL, Start, expected, make


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
        ({"timeout": 1e307}, "--timeout 1e.307: wanted .* at most 86400"),
    ],
)
def test_servers_that_make_no_sense(given: dict[str, Any], told: str) -> None:
    with pytest.raises(UserError, match=told):
        Server(**{"url": "http://localhost", **given})


def test_a_key_that_is_not_there() -> None:
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
            main(["regenerate", str(data), "--target", "./none", "--out", str(tmp_path / "o.jsonl"), *more])
        assert left.value.code == 2
        assert capsys.readouterr().err.strip().splitlines()[-1].startswith(f"error: {told}")
    assert list(tmp_path.iterdir()) == [data]
