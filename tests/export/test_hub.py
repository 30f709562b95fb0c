"""An export goes up to the hub's own interface whole and as one commit: here, a small hub on loopback."""

from __future__ import annotations

import base64
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from eagle_train.errors import UserError
from eagle_train.export.export import export
from eagle_train.export.hub import push


class Hub(ThreadingHTTPServer):
    """Takes repositories and commits whose files come inside the request."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.repositories: dict[str, dict] = {}
        self.commits: list[dict[str, bytes]] = []
        self.tokens: set[str | None] = set()
        self.refuse = False


class _Handler(BaseHTTPRequestHandler):
    server: Hub

    def do_GET(self) -> None:
        self._reply({"sha": "0" * 40, "siblings": []}, 403 if self.server.refuse else 200)

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        self.server.tokens.add(self.headers.get("Authorization"))
        if self.server.refuse:
            self._reply({"error": "You have no right to do this"}, 403)
        elif self.path == "/api/repos/create":
            asked = json.loads(body)
            self.server.repositories[f"{asked['organization']}/{asked['name']}"] = asked
            place = f"http://127.0.0.1:{self.server.server_port}"
            self._reply({"url": f"{place}/{asked['organization']}/{asked['name']}"})
        elif "/preupload/" in self.path:
            files = json.loads(body)["files"]
            regular = [{"path": f["path"], "uploadMode": "regular", "shouldIgnore": False} for f in files]
            self._reply({"files": regular})
        elif "/commit/" in self.path:
            self.server.commits.append(_files(body))
            self._reply(
                {
                    "commitUrl": f"http://127.0.0.1:{self.server.server_port}/owner/head/commit/1",
                    "commitOid": "1" * 40,
                    "success": True,
                }
            )
        else:
            self._reply({}, 200)

    def _reply(self, value: object, status: int = 200) -> None:
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.end_headers()
        self.wfile.write(json.dumps(value).encode())

    def log_message(self, *arguments: object) -> None:
        pass


def _files(body: bytes) -> dict[str, bytes]:
    lines = [json.loads(line) for line in body.splitlines()]
    values = [line["value"] for line in lines if line["key"] == "file"]
    return {value["path"]: base64.b64decode(value["content"]) for value in values}


@pytest.fixture
def hub(monkeypatch) -> Iterator[Hub]:
    with Hub() as served:
        thread = threading.Thread(target=served.serve_forever, daemon=True)
        thread.start()
        monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", f"http://127.0.0.1:{served.server_port}")
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
        monkeypatch.setenv("HF_TOKEN", "hf_test")
        yield served
        served.shutdown()
        thread.join()


def test_every_file_of_the_export_is_in_one_commit(hub, head_dir, tmp_path):
    out = tmp_path / "out"
    export(head_dir("eagle3", draft_vocab_size=40), out, engine="vllm")
    push(out, "owner/head", private=True)
    assert list(hub.repositories) == ["owner/head"]
    asked = hub.repositories["owner/head"]
    assert asked.get("visibility") == "private" or asked.get("private") is True
    assert hub.tokens == {"Bearer hf_test"}
    local = {str(file.relative_to(out)): file.read_bytes() for file in out.rglob("*") if file.is_file()}
    assert "check/reference.safetensors" in local
    assert hub.commits == [local]


def test_what_the_hub_refuses_is_one_line_and_the_export_stays(hub, head_dir, tmp_path):
    out = tmp_path / "out"
    export(head_dir("eagle1"), out, engine="vllm")
    hub.refuse = True
    with pytest.raises(UserError, match=r"owner/head: could not be uploaded \(.*403.*\); .* is whole"):
        push(out, "owner/head")
    assert hub.commits == []
    assert (out / "model.safetensors").is_file()
    with pytest.raises(UserError, match="wanted the repository as OWNER/NAME"):
        push(out, "head")


def test_an_unreachable_hub_is_one_line(head_dir, tmp_path, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setenv("HF_TOKEN", "hf_test")
    export(head_dir("eagle1"), tmp_path / "out", engine="vllm")
    with pytest.raises(UserError, match=r"owner/head: could not be uploaded \("):
        push(tmp_path / "out", "owner/head")
