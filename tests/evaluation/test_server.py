"""A server's counters are read as its engine gives them and compared with the loop's, prompt by prompt."""

from __future__ import annotations

import contextlib
import json
import shlex
import socketserver
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import torch

from eagle_train.decoding.drafters import HeadDrafter
from eagle_train.decoding.loop import Settings, generate, plain
from eagle_train.decoding.shapes import Chain, Dynamic, Shape
from eagle_train.errors import UserError
from eagle_train.evaluation.counters import Counters
from eagle_train.evaluation.engines import Vllm, find_engine, read_counters
from eagle_train.evaluation.questions import Question, conversations
from eagle_train.evaluation.server import compare_with_server, server_fault, server_lines
from eagle_train.heads.config import HeadConfig
from eagle_train.heads.disk import build_head, load_head, save_head
from eagle_train.targets.load import Target, load_target

_METRICS = """\
# HELP vllm:spec_decode_num_drafts_total Number of spec decoding drafts.
# TYPE vllm:spec_decode_num_drafts_total counter
vllm:spec_decode_num_drafts_total{engine="0",model_name="m"} 40.0
vllm:spec_decode_num_drafts_created{engine="0",model_name="m"} 1.7e+09
vllm:spec_decode_num_draft_tokens_total{engine="0",model_name="m"} 120.0
vllm:spec_decode_num_accepted_tokens_total{engine="0",model_name="m"} 33.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="m",position="0"} 20.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="m",position="2"} 4.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="m",position="1"} 9.0
vllm:num_requests_running{engine="0",model_name="m"} 1.0
"""
_QUESTIONS = [
    Question(str(i), "", (text,)) for i, text in enumerate(("Why is the sea deep?", "Bread?", "Hi"))
]


def test_prometheus_text_is_read_by_name_and_position_and_engines_add_up():
    assert read_counters(_METRICS) == Counters(40, 33, (20, 9, 4))
    second = _METRICS.replace('engine="0"', 'engine="1"')
    assert read_counters(_METRICS + second) == Counters(80, 66, (40, 18, 8))
    assert read_counters("vllm:num_requests_running 1.0") == Counters()
    assert (read_counters(_METRICS) - Counters(10, 3, (2, 1, 0))).figures == {
        "drafts": 30,
        "acceptance_length": 2.0,
        "accepted_by_position": [18 / 30, 8 / 30, 4 / 30],
    }
    assert Counters(4, 3, (2, 1)) - Counters() == Counters(4, 3, (2, 1))


class FakeEngine(ThreadingHTTPServer):
    """Serves a target with a head as vLLM does: completions by ids, counters on /metrics."""

    def __init__(self, target: Target, head: Path, gamma: int) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.target, self.gamma = target, gamma
        self.drafter = HeadDrafter(load_head(head), target, Chain(gamma))
        self.sums = [7, 5, *[3] * gamma]  # it has served others before
        self.drafts, self.asked = True, []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def answer(self, body: dict[str, Any]) -> list[int]:
        self.asked.append(body)
        settings = Settings(max_new_tokens=body["max_tokens"], eos_ids=tuple(body["stop_token_ids"]))
        made = generate(self.target, self.drafter, body["prompt"], settings)
        for accepted in made.accepted_uncut:
            counted = [1, accepted, *(int(accepted > i) for i in range(self.gamma))]
            self.sums = [a + b for a, b in zip(self.sums, counted, strict=True)]
        return made.ids

    def metrics(self) -> str:
        if not self.drafts:
            return "vllm:num_requests_running 0.0\n"
        names = ["num_drafts_total{}", "num_accepted_tokens_total{}"]
        names += [f'num_accepted_tokens_per_pos_total{{position="{i}"}}' for i in range(self.gamma)]
        return "".join(f"vllm:spec_decode_{n} {v}.0\n" for n, v in zip(names, self.sums, strict=True))


class _Handler(BaseHTTPRequestHandler):
    server: FakeEngine

    def do_GET(self) -> None:
        pages = {
            "/v1/models": json.dumps({"data": [{"id": "served", "owned_by": "vllm"}]}),
            "/metrics": self.server.metrics(),
        }
        self._reply(pages[self.path])

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        assert self.path == "/v1/completions"
        self._reply(json.dumps({"choices": [{"text": "", "token_ids": self.server.answer(body)}]}))

    def _reply(self, text: str) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, *arguments: object) -> None:
        pass


@pytest.fixture(scope="module")
def target(tiny_target_dir: Path) -> Target:
    return load_target(str(tiny_target_dir), dtype="fp32", device="cpu")


@pytest.fixture(scope="module")
@torch.inference_mode()
def head(target, tmp_path_factory) -> Path:
    """An EAGLE-1 head that is right now and then: fc fitted to the states of texts that the target wrote."""
    made = build_head(HeadConfig.for_target(target.config.to_dict(), "eagle1"))
    inputs, outputs = [], []
    for _, conversation in conversations(target.tokenizer, _QUESTIONS):
        prompt = conversation.ask(0)
        ids = torch.tensor([*prompt, *plain(target, prompt, Settings(max_new_tokens=30)).ids])
        states = target.run_body(ids[None])[0]
        inputs.append(torch.cat([target.embedding[ids[1:]], states[:-1]], dim=-1)[len(prompt) - 1 :])
        outputs.append(states[1:][len(prompt) - 1 :])
    made.fc.weight.copy_(torch.linalg.lstsq(torch.cat(inputs), torch.cat(outputs)).solution.T)
    made.layers[0].self_attn.o_proj.weight.zero_()
    made.layers[0].mlp.down_proj.weight.zero_()
    folder = tmp_path_factory.mktemp("server") / "head"
    save_head(made, folder)
    return folder


@pytest.fixture
def engine(target, head) -> Iterator[FakeEngine]:
    with FakeEngine(target, head, gamma=4) as served:
        thread = threading.Thread(target=served.serve_forever, daemon=True)
        thread.start()
        yield served
        served.shutdown()
        thread.join()


def test_the_loop_and_a_server_that_does_the_same_agree_prompt_by_prompt(engine, target, head):
    before = list(engine.sums)
    report = compare_with_server(head, target, engine.url + "/v1/", _QUESTIONS, max_new_tokens=30, show=False)
    assert [body["model"] for body in engine.asked] == ["served"] * 3
    assert all(body["temperature"] == 0 and body["max_tokens"] == 30 for body in engine.asked)
    assert report["differences"] == []
    assert report["tree"] == Chain(4).figures
    assert (report["prompts"], report["server"]["engine"]) == (3, "vLLM")
    assert all(body["repetition_penalty"] == 1 for body in engine.asked)  # not what the target's files say
    served = [b - a for a, b in zip(before, engine.sums, strict=True)]
    assert report["server"]["drafts"] == report["loop"]["drafts"] == served[0] > 0
    assert report["server"]["acceptance_length"] == 1 + served[1] / served[0]
    assert report["loop"]["accepted_by_position"] == [count / served[0] for count in served[2:]]
    assert served[1] > 0  # or nothing was compared
    assert server_lines(report)[-1] == "  every text and every counter equal"
    assert server_fault(report) is None


def test_a_server_with_another_head_is_told_by_its_counters(engine, target, head, tmp_path):
    other = load_head(head)
    with torch.no_grad():
        other.fc.weight.mul_(-1)
    save_head(other, tmp_path / "other")
    report = compare_with_server(
        tmp_path / "other", target, engine.url, _QUESTIONS, max_new_tokens=30, show=False
    )
    assert report["differences"]
    assert all(difference["same_text"] for difference in report["differences"])
    assert "prompts differ, 0 of them in their text" in server_lines(report)[-1]
    assert server_fault(report).endswith("of 3 prompts; first: question 0, in its counters")


def test_servers_that_cannot_be_used_are_one_line(engine, target, head):
    engine.drafts = False
    with pytest.raises(
        UserError, match="no vllm:spec_decode counters; wanted a vLLM server that was started"
    ):
        compare_with_server(head, target, engine.url, _QUESTIONS, show=False)
    with pytest.raises(UserError, match=r"http://127\.0\.0\.1:9/v1/models: cannot be reached"):
        compare_with_server(head, target, "http://127.0.0.1:9", _QUESTIONS, show=False)
    with pytest.raises(UserError, match="wanted one such as http://localhost:8000"):
        compare_with_server(head, target, "localhost:8000", _QUESTIONS, show=False)


def test_the_command_prints_both_sides_and_refuses_what_it_cannot_compare(
    engine, head, tiny_target_dir, capsys
):
    from eagle_cli.main import main

    def run(*more: str) -> int:
        asked = ["eval", str(head), "--target", str(tiny_target_dir), "--against-server", engine.url, *more]
        with pytest.raises(SystemExit) as exit_:
            main(asked)
        assert isinstance(exit_.value.code, int)
        return exit_.value.code

    assert run("--num-questions", "2", "--max-new-tokens", "8", "--dtype", "fp32") == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].endswith(
        "2 prompts, 16 tokens, greedy, chain of 4, up to 8 new tokens; acceptance length as vLLM counts it, "
        "1 + accepted / drafts"
    )
    assert lines[1].startswith(f"  vLLM at {engine.url}: acceptance length ")
    assert lines[2].startswith("  our loop, fp32: acceptance length ")
    assert lines[3] == "  every text and every counter equal"
    assert run("--draft", "dynamic") == 2
    assert "drafts greedily, as the server does, so --draft has no meaning" in capsys.readouterr().err
    answer = engine.answer
    engine.answer = lambda body: [*answer(body)[:-1], 7]
    assert run("--num-questions", "1", "--max-new-tokens", "8", "--dtype", "fp32") == 1
    differs = "error: server and loop differ on 1 of 1 prompt; first: question 0, in its text"
    assert capsys.readouterr().err.splitlines()[-1].startswith(differs[:-22])


@pytest.mark.parametrize(
    ("mode", "options"),
    [
        (
            "--against-server",
            "--gamma=2 --max-turns=1 --block --top-p=0.5 --temperature=0 --seed=1 --report=x.csv --window=9 "
            "--method=plain --other-target --device-map=auto --top-k-sampling=4 --predict=x",
        ),
        (
            "--predict",
            "--window=9 --level=3 --guesses=4 --max-new-tokens=5 --seed=0 --against-server=http://x --block "
            "--repetition-penalty=1.0 --top-k=4 --questions=x --num-questions=3 --max-turns=1",
        ),
    ],
)
def test_an_option_that_a_mode_does_not_read_is_refused(mode, options, capsys):
    from eagle_cli.main import main

    for option in options.split():
        with pytest.raises(SystemExit) as left:
            main(["eval", "head", "--target", "t", f"{mode}=http://127.0.0.1:9", option])
        error = capsys.readouterr().err
        assert left.value.code == 2
        assert error.startswith("error: eagle eval: --")
        assert "has no meaning" in error
        assert option.split("=")[0] in error
        assert error.count("\n") == 1


_MODELS = json.dumps({"data": [{"id": "served"}]})
_ODD_REPLIES = [
    *(("/v1/models", text) for text in ("<html>", "[]", "{}", '["x"]', '{"data": ["x"]}', '{"data": [{}]}')),
    *(("/v1/models", text) for text in ('{"data": []}', '{"data": [{"id": 5}]}', "[" * 100_000, "\xff")),
    *(("/metrics", _METRICS.replace("33.0", text)) for text in ("NaN", "+Inf", "abc", "-1")),
    ("/metrics", _METRICS.replace('position="1"', 'position="7"')),
    ("/metrics", "\n".join(line for line in _METRICS.splitlines() if "per_pos" not in line)),
    *(("/v1/completions", text) for text in ("<html>", "[1]", "{}", '{"choices": []}', '{"choices": [{}]}')),
    *(
        ("/v1/completions", json.dumps({"choices": [{"token_ids": ids}]}))
        for ids in (None, 5, "ab", [1.5], [True], [-1], {"0": 1})
    ),
]


def _raw(text: str) -> bytes:
    return b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(text) + text.encode("latin-1")


@pytest.fixture
def replies() -> Iterator[tuple[str, dict[str, Any]]]:
    """An address, and what is said there on each path: bytes, or a list of them, one after the other."""
    said: dict[str, Any] = {}

    class Raw(socketserver.StreamRequestHandler):
        def handle(self) -> None:
            path, size = self.rfile.readline().split()[1].decode(), 0
            while (line := self.rfile.readline().strip()) != b"":
                size = int(line.split()[1]) if line.lower().startswith(b"content-length") else size
            self.rfile.read(size)
            answer = said[path]
            self.wfile.write(
                answer if isinstance(answer, bytes) else answer.pop(0) if answer[1:] else answer[0]
            )

    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), Raw) as served:
        thread = threading.Thread(target=served.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
        thread.start()
        said |= {"/v1/models": _raw(_MODELS), "/metrics": _raw(_METRICS)}
        yield f"http://127.0.0.1:{served.server_address[1]}", said
        served.shutdown()
        thread.join()


@pytest.mark.parametrize(("path", "text"), _ODD_REPLIES)
def test_an_odd_reply_is_one_line(replies, path, text):
    url, said = replies
    said[path] = _raw(text)
    with pytest.raises(UserError) as caught:
        engine = find_engine(url)
        assert isinstance(engine, Vllm)
        engine.counters()
        engine.answer([1], 4, [])
    assert str(caught.value).startswith(f"{url}{path}: ")


@pytest.mark.parametrize(
    "reply",
    [
        b"",
        b"nonsense\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 99\r\n\r\nshort",
        b"HTTP/1.1 500 No\r\n\r\n",
    ],
)
def test_a_broken_reply_is_one_line(replies, reply):
    url, said = replies
    said["/v1/models"] = reply
    with pytest.raises(UserError, match=f"{url}/v1/models: "):
        find_engine(url)


@pytest.mark.parametrize(
    "url",
    ["", "http://", "http://[::1", "http://a b/", "http://x:port", "http://x:99999", "http://\u2603.\x00"],
)
def test_an_impossible_address_is_one_line(url):
    with pytest.raises(UserError) as caught:
        find_engine(url)
    given = " ".join(shlex.quote(url).split())
    assert str(caught.value) == (
        f"--against-server {given}: no address; wanted one such as http://localhost:8000"
    )


@pytest.mark.parametrize(
    ("later", "words"),
    [
        (_METRICS.replace("40.0", "39.0"), "a counter went down since the prompt before"),
        (_METRICS.replace(" 9.0", " 8.0"), "a counter went down since the prompt before"),
        (
            _METRICS.replace('accepted_tokens_per_pos_total{engine="0",model_name="m",position="2"', "x{"),
            "3 positions before, 2 now since the prompt before",
        ),
        (_METRICS, "not one draft was counted in 1 prompt,"),
    ],
)
def test_counters_that_cannot_be_compared_are_one_line(replies, target, head, later, words):
    url, said = replies
    said["/metrics"] = [_raw(_METRICS), _raw(_METRICS), _raw(later)]
    said["/v1/completions"] = _raw(json.dumps({"choices": [{"token_ids": [1]}]}))
    with pytest.raises(UserError, match=words):
        compare_with_server(head, target, url, _QUESTIONS[:1], max_new_tokens=2, show=False)


@contextlib.contextmanager
def sglang(folder: Path, info: dict[str, Any], answers: Sequence[dict[str, Any]] = ()) -> Iterator[str]:
    """Run SGLang's interface in a process of its own; yield its address."""
    state = folder / "state.json"
    state.write_text(json.dumps({"info": info, "answers": list(answers)}))
    command = [sys.executable, "-S", str(Path(__file__).with_name("sglang_process.py")), str(state)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            yield f"http://127.0.0.1:{int(process.stdout.readline())}"
        finally:
            process.terminate()


def _info(steps: int, top_k: int, nodes: int, **more: Any) -> dict[str, Any]:
    return {
        "speculative_algorithm": "EAGLE",
        "speculative_num_steps": steps,
        "speculative_eagle_topk": top_k,
        "speculative_num_draft_tokens": nodes,
        "speculative_adaptive": False,
        **more,
    }


def _answers(target: Target, head: Path, shape: Shape, limit: int) -> list[dict[str, Any]]:
    """Return what a server with this head and shape says to the questions."""
    drafter = HeadDrafter(load_head(head), target, shape)
    found = []
    for _, conversation in conversations(target.tokenizer, _QUESTIONS):
        prompt = conversation.ask(0)
        made = generate(target, drafter, prompt, Settings(max_new_tokens=limit))
        found.append({"prompt": prompt, "limit": limit, "ids": made.ids, "rounds": made.accepted_uncut})
    return found


@pytest.mark.parametrize(
    ("shape", "info"), [(Chain(4), _info(4, 1, 5)), (Dynamic(7, 3, 2), _info(2, 3, 7))], ids=["chain", "tree"]
)
def test_an_sglang_server_is_known_by_itself_and_compared_by_its_own_count(
    shape, info, target, head, tmp_path
):
    answers = _answers(target, head, shape, 30)
    rounds = [accepted for answer in answers for accepted in answer["rounds"]]
    tokens = sum(len(answer["ids"]) for answer in answers)
    with sglang(tmp_path, info, answers) as url:
        report = compare_with_server(head, target, url, _QUESTIONS, max_new_tokens=30, show=False)
    assert report["differences"] == []
    assert (report["server"]["engine"], report["tree"]) == ("SGLang", shape.figures)
    assert report["counts_as"] == "completion tokens / verifications"
    assert sum(rounds) > 0  # or nothing was compared
    for side in ("server", "loop"):
        assert report[side]["drafts"] == len(rounds)
        assert report[side]["acceptance_length"] == tokens / len(rounds)
        shares = [sum(n > i for n in rounds) / len(rounds) for i in range(shape.figures["depth"])]
        assert report[side]["accepted_by_position"] == shares
    assert f"SGLang at {url}: acceptance length " in "\n".join(server_lines(report))


def test_an_sglang_server_with_another_head_is_told_by_its_counters(target, head, tmp_path):
    answers = _answers(target, head, Chain(4), 30)
    answers[1]["rounds"][0] = 4 - answers[1]["rounds"][0]
    with sglang(tmp_path, _info(4, 1, 5), answers) as url:
        report = compare_with_server(head, target, url, _QUESTIONS, max_new_tokens=30, show=False)
    assert [(one["question"], one["same_text"]) for one in report["differences"]] == [("1", True)]


def test_an_answer_of_one_token_was_never_verified_by_sglang(target, head, tmp_path):
    answers = _answers(target, head, Chain(4), 1)
    with (
        sglang(tmp_path, _info(4, 1, 5), answers) as url,
        pytest.raises(UserError, match="not one draft was counted in 3 prompts"),
    ):
        compare_with_server(head, target, url, _QUESTIONS, max_new_tokens=1, show=False)


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"speculative_algorithm": None}, "speculative_algorithm is None, wanted EAGLE or EAGLE3"),
        ({"speculative_algorithm": "NGRAM"}, "speculative_algorithm is NGRAM, wanted EAGLE or EAGLE3"),
        ({"speculative_adaptive": True}, "speculative_adaptive changes the draft's length"),
        ({"speculative_num_steps": None}, "chain: got None guesses, wanted a whole number"),
    ],
)
def test_sglang_settings_that_cannot_be_compared_are_one_line(more, words, replies):
    url, said = replies
    said["/v1/models"] = _raw(json.dumps({"data": [{"id": "m", "owned_by": "sglang"}]}))
    said["/server_info"] = _raw(json.dumps(_info(4, 1, 5, **more)))
    with pytest.raises(UserError, match=words):
        find_engine(url)


_META = {"spec_verify_ct": 3, "spec_num_correct_drafts": 2, "spec_correct_drafts_histogram": [2, 0, 1]}


@pytest.mark.parametrize(
    "meta",
    [
        {},
        {**_META, "spec_verify_ct": 2},
        {**_META, "spec_num_correct_drafts": 3},
        {**_META, "spec_correct_drafts_histogram": None},
        {**_META, "spec_correct_drafts_histogram": [2, 0, "1"]},
        {
            "spec_verify_ct": 1,
            "spec_num_correct_drafts": 5,
            "spec_correct_drafts_histogram": [0, 0, 0, 0, 0, 1],
        },
    ],
)
def test_sglang_counts_that_contradict_each_other_are_one_line(meta, replies):
    url, said = replies
    said["/v1/models"] = _raw(json.dumps({"data": [{"id": "m", "owned_by": "sglang"}]}))
    said["/server_info"] = _raw(json.dumps(_info(4, 1, 5)))
    engine = find_engine(url)
    said["/generate"] = _raw(json.dumps({"output_ids": [1, 2, 3, 4, 5], "meta_info": _META}))
    assert engine.ask([1], 5, []) == ([1, 2, 3, 4, 5], Counters(3, 2, (1, 1, 0, 0)))
    said["/generate"] = _raw(json.dumps({"output_ids": [1, 2, 3, 4, 5], "meta_info": meta}))
    with pytest.raises(UserError, match=f"{url}/generate: .*wanted ids and, in meta_info, spec_verify_ct"):
        engine.ask([1], 5, [])
