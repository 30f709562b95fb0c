"""Whatever an address answers, in vLLM's name or in SGLang's, a fault is one line that names it."""

from __future__ import annotations

import json
import shlex
from typing import Any

import pytest

from eagle_train.errors import UserError
from eagle_train.evaluation.counters import Counters
from eagle_train.evaluation.engines import Vllm, find_engine, read_counters
from eagle_train.evaluation.server import compare_with_server

from .servers import QUESTIONS, sglang_info

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


@pytest.fixture
def vllm(replies) -> tuple[str, dict[str, Any]]:
    """An address that answers as vLLM does, and its answers."""
    url, said = replies
    said |= {"/v1/models": _raw(_MODELS), "/metrics": _raw(_METRICS)}
    return url, said


@pytest.fixture
def sglang(replies) -> tuple[str, dict[str, Any]]:
    """An address that says it is SGLang's, and its answers."""
    url, said = replies
    said["/v1/models"] = _raw(json.dumps({"data": [{"id": "m", "owned_by": "sglang"}]}))
    return url, said


@pytest.mark.parametrize(("path", "text"), _ODD_REPLIES)
def test_an_odd_reply_is_one_line(vllm, path, text):
    url, said = vllm
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
def test_a_broken_reply_is_one_line(vllm, reply):
    url, said = vllm
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
def test_counters_that_cannot_be_compared_are_one_line(vllm, target, head, later, words):
    url, said = vllm
    said["/metrics"] = [_raw(_METRICS), _raw(_METRICS), _raw(later)]
    said["/v1/completions"] = _raw(json.dumps({"choices": [{"token_ids": [1]}]}))
    with pytest.raises(UserError, match=words):
        compare_with_server(head, target, url, QUESTIONS[:1], max_new_tokens=2, show=False)


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"speculative_algorithm": None}, "speculative_algorithm is None, wanted EAGLE or EAGLE3"),
        ({"speculative_algorithm": "NGRAM"}, "speculative_algorithm is NGRAM, wanted EAGLE or EAGLE3"),
        ({"speculative_adaptive": True}, "speculative_adaptive changes the draft's length"),
        ({"speculative_num_steps": None}, "chain: got None guesses, wanted a whole number"),
    ],
)
def test_sglang_settings_that_cannot_be_compared_are_one_line(more, words, sglang):
    url, said = sglang
    said["/server_info"] = _raw(json.dumps(sglang_info(4, 1, 5, **more)))
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
def test_sglang_counts_that_contradict_each_other_are_one_line(meta, sglang):
    url, said = sglang
    said["/server_info"] = _raw(json.dumps(sglang_info(4, 1, 5)))
    engine = find_engine(url)
    said["/generate"] = _raw(json.dumps({"output_ids": [1, 2, 3, 4, 5], "meta_info": _META}))
    assert engine.ask([1], 5, []) == ([1, 2, 3, 4, 5], Counters(3, 2, (1, 1, 0, 0)))
    said["/generate"] = _raw(json.dumps({"output_ids": [1, 2, 3, 4, 5], "meta_info": meta}))
    with pytest.raises(UserError, match=f"{url}/generate: .*wanted ids and, in meta_info, spec_verify_ct"):
        engine.ask([1], 5, [])
