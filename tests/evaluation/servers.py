"""Stand-ins for engines' servers: one that decodes as vLLM does, one in a process of its own as SGLang."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from eagle_train.decoding.drafters import HeadDrafter
from eagle_train.decoding.loop import Settings, generate
from eagle_train.decoding.shapes import Chain
from eagle_train.evaluation.questions import Question
from eagle_train.heads.disk import load_head
from eagle_train.targets.load import Target

QUESTIONS = [Question(str(i), "", (text,)) for i, text in enumerate(("Why is the sea deep?", "Bread?", "Hi"))]


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


def sglang_info(steps: int, top_k: int, nodes: int, **more: Any) -> dict[str, Any]:
    return {
        "speculative_algorithm": "EAGLE",
        "speculative_num_steps": steps,
        "speculative_eagle_topk": top_k,
        "speculative_num_draft_tokens": nodes,
        "speculative_adaptive": False,
        **more,
    }
