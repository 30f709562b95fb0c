"""Heads go up to the hub's own interface whole, and come down from it: here, a small hub on loopback."""

from __future__ import annotations

import base64
import json
import threading
from collections.abc import Iterator, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
import torch
from safetensors.torch import load_file

from eagle_train.errors import UserError
from eagle_train.evaluation.heads import find_head, open_head
from eagle_train.export.export import export
from eagle_train.export.hub import push
from eagle_train.heads.disk import load_head
from eagle_train.hub import _silence as asked_once


class Hub(ThreadingHTTPServer):
    """Takes repositories and commits whose files come inside the request; gives the files of one."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.repositories: dict[str, dict] = {}
        self.commits: list[dict[str, bytes]] = []
        self.tokens: set[str | None] = set()
        self.refuse = False
        self.files: dict[str, bytes] = {}
        self.given: list[str] = []


class _Handler(BaseHTTPRequestHandler):
    server: Hub

    def do_GET(self) -> None:
        files, name = self.server.files, self.path.rpartition("/")[2]
        if "/tree/" in self.path:
            sizes = {name: len(content) for name, content in files.items()}
            self._reply([{"type": "file", "path": at, "size": sizes[at], "oid": at} for at in sizes])
        elif "/resolve/" in self.path:
            if self.command == "GET":
                self.server.given.append(name)
            self._reply(files[name], 200, {"X-Repo-Commit": "0" * 40, "ETag": f'"{name}"'})
        else:
            self._reply({"id": "owner/head", "sha": "0" * 40}, 403 if self.server.refuse else 200)

    do_HEAD = do_GET

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

    def _reply(self, value: object, status: int = 200, headers: Mapping[str, str] | None = None) -> None:
        body = value if isinstance(value, bytes) else json.dumps(value).encode()
        self.send_response(status)
        length = {"Content-Type": "application/json", "Content-Length": str(len(body))}
        for name, said in {**length, **(headers or {})}.items():
            self.send_header(name, said)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, *arguments: object) -> None:
        pass


def _files(body: bytes) -> dict[str, bytes]:
    lines = [json.loads(line) for line in body.splitlines()]
    values = [line["value"] for line in lines if line["key"] == "file"]
    return {value["path"]: base64.b64decode(value["content"]) for value in values}


@pytest.fixture
def hub(monkeypatch, tmp_path) -> Iterator[Hub]:
    with Hub() as served:
        thread = threading.Thread(target=served.serve_forever, daemon=True)
        thread.start()
        address = f"http://127.0.0.1:{served.server_port}"
        monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", address)
        monkeypatch.setattr(
            "huggingface_hub.constants.HUGGINGFACE_CO_URL_TEMPLATE",
            address + "/{repo_id}/resolve/{revision}/{filename}",
        )
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
        monkeypatch.setenv("HF_TOKEN", "hf_test")
        asked_once.cache_clear()
        yield served
        asked_once.cache_clear()
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


@pytest.mark.parametrize("safe", [True, False])
def test_a_head_on_the_hub_is_fetched_by_its_id_and_its_pickle_only_where_it_has_nothing_else(
    safe, hub, head_dir, tmp_path
):
    source = head_dir("eagle3", draft_vocab_size=40)
    torch.save(load_file(source / "model.safetensors"), source / "pytorch_model.bin")
    config = json.loads((source / "config.json").read_text())
    del config["eagle_train"]
    hub.files = {file.name: file.read_bytes() for file in source.iterdir()}
    hub.files |= {"config.json": json.dumps(config).encode(), "training_args.bin": b"not a head's"}
    if not safe:
        del hub.files["model.safetensors"]
    opened = open_head("owner/head", depth=8)
    assert sorted(hub.given) == ["config.json", "model.safetensors" if safe else "pytorch_model.bin"]
    assert torch.equal(opened.lm_head.weight, load_head(source).lm_head.weight)
    hub.refuse = True
    assert find_head("owner/head").parent.parent.parent == tmp_path / "cache"  # what is cached needs no hub
