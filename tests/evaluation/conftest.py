"""A tiny target, heads for it, and an address that says whatever a test wants."""

from __future__ import annotations

import socketserver
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from eagle_train.decoding.loop import Settings, plain
from eagle_train.evaluation.questions import Question, conversations
from eagle_train.heads.config import HeadConfig
from eagle_train.heads.disk import EagleHead, build_head, save_head
from eagle_train.targets.load import Target, load_target

from .servers import QUESTIONS


@pytest.fixture(scope="module")
def target(tiny_target_dir: Path) -> Target:
    return load_target(str(tiny_target_dir), dtype="fp32", device="cpu")


@pytest.fixture(scope="module")
def head_dir(target: Target, tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("heads") / "head"
    save_head(build_head(HeadConfig.for_target(target.config.to_dict(), "eagle3")), folder)
    return folder


@torch.inference_mode()
def fitted_head(target: Target, questions: Sequence[Question], settings: Settings) -> EagleHead:
    """An EAGLE-1 head that is right now and then: fc fitted to the states of texts that the target wrote."""
    made = build_head(HeadConfig.for_target(target.config.to_dict(), "eagle1"))
    inputs, outputs = [], []
    for _, conversation in conversations(target.tokenizer, list(questions)):
        prompt = conversation.ask(0)
        ids = torch.tensor([*prompt, *plain(target, prompt, settings).ids])
        states = target.run_body(ids[None])[0]
        inputs.append(torch.cat([target.embedding[ids[1:]], states[:-1]], dim=-1)[len(prompt) - 1 :])
        outputs.append(states[1:][len(prompt) - 1 :])
    made.fc.weight.copy_(torch.linalg.lstsq(torch.cat(inputs), torch.cat(outputs)).solution.T)
    made.layers[0].self_attn.o_proj.weight.zero_()
    made.layers[0].mlp.down_proj.weight.zero_()
    return made


@pytest.fixture(scope="module")
def head(target, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("server") / "head"
    save_head(fitted_head(target, QUESTIONS, Settings(max_new_tokens=30)), folder)
    return folder


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
        yield f"http://127.0.0.1:{served.server_address[1]}", said
        served.shutdown()
        thread.join()
