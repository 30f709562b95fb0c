"""A process that speaks SGLang's HTTP interface from a list of answers made beforehand.

    python sglang_process.py STATE.json

STATE holds `info` (fields of /server_info), `answers` (prompt, ids, end, and the guesses accepted in each
verification) and prints the port. Names and arithmetic are SGLang's: meta_info carries the counts of
speculation only where a verification took place, spec_accept_length is completion tokens over verifications,
spec_correct_drafts_histogram[n] counts verifications with n right guesses and ends at the largest n seen.
"""

from __future__ import annotations

import json
import sys
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

STATE = json.loads(Path(sys.argv[1]).read_text())
ANSWERS = {tuple(one["prompt"]): one for one in STATE["answers"]}


def generate(body: dict[str, Any]) -> dict[str, Any]:
    """Answer as /generate does when nothing is streamed."""
    asked = body["sampling_params"]
    assert asked["temperature"] == 0
    answer = ANSWERS[tuple(body["input_ids"])]
    assert asked["max_new_tokens"] == answer["limit"]
    ids, rounds = answer["ids"], answer["rounds"]
    ended = ids[-1] in asked["stop_token_ids"]
    meta: dict[str, Any] = {
        "id": "0b1f",
        "finish_reason": {"type": "stop", "matched": ids[-1]}
        if ended
        else {"type": "length", "length": len(ids)},
        "prompt_tokens": len(body["input_ids"]),
        "weight_version": "default",
        "num_retractions": 0,
        "reasoning_tokens": 0,
        "completion_tokens": len(ids),
        "cached_tokens": 0,
    }
    if rounds:
        proposed = len(rounds) * (STATE["info"]["speculative_num_draft_tokens"] - 1)
        histogram = [0] * (max(rounds) + 1)
        for accepted in rounds:
            histogram[accepted] += 1
        meta |= {
            "spec_accept_rate": sum(rounds) / proposed,
            "spec_accept_length": len(ids) / len(rounds),
            "spec_num_correct_drafts": sum(rounds),
            "spec_num_proposed_drafts": proposed,
            "spec_verify_ct": len(rounds),
            "spec_correct_drafts_histogram": histogram,
        }
    return {"text": "", "output_ids": ids, "meta_info": {**meta, "e2e_latency": 0.1}}


class Handler(BaseHTTPRequestHandler):
    """The four addresses that are asked."""

    def do_GET(self) -> None:
        """Say who is served, and how."""
        card = {"id": "/models/t", "object": "model", "created": 1, "owned_by": "sglang", "root": "/models/t"}
        pages = {
            "/v1/models": {"object": "list", "data": [{**card, "parent": None, "max_model_len": 512}]},
            "/server_info": {"model_path": "/models/t", **STATE["info"], "internal_states": [{}]},
        }
        self._reply(pages[self.path])

    def do_POST(self) -> None:
        """Answer a prompt."""
        assert self.path == "/generate"
        self._reply(generate(json.loads(self.rfile.read(int(self.headers["Content-Length"])))))

    def _reply(self, value: object) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.end_headers()
        self.wfile.write(json.dumps(value).encode())

    def log_message(self, *arguments: object) -> None:
        """Say nothing."""


with HTTPServer(("127.0.0.1", 0), Handler) as served:
    print(served.server_port, flush=True)
    served.serve_forever()
