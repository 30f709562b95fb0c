"""A hub that does not answer is asked once, whatever is wanted of it; what is cached needs none."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator

import pytest
from huggingface_hub import constants

from eagle_train import hub
from eagle_train.data.sources import find_sources
from eagle_train.data.tokenizer import load_tokenizer
from eagle_train.errors import UserError
from eagle_train.evaluation.heads import find_head
from eagle_train.evaluation.hub_questions import hub_records
from eagle_train.targets.checkpoint import load_config
from eagle_train.targets.load import load_target


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """A hub that hangs up on every call, and the calls it got."""
    found: list[int] = []
    listening = socket.create_server(("127.0.0.1", 0))

    def hang_up() -> None:
        while True:
            try:
                connection, _ = listening.accept()
            except OSError:
                return
            found.append(1)
            connection.close()

    threading.Thread(target=hang_up, daemon=True).start()
    address = f"http://127.0.0.1:{listening.getsockname()[1]}"
    monkeypatch.setattr(constants, "ENDPOINT", address)
    monkeypatch.setattr(
        constants, "HUGGINGFACE_CO_URL_TEMPLATE", address + "/{repo_id}/resolve/{revision}/{filename}"
    )
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    hub._silence.cache_clear()
    yield found
    hub._silence.cache_clear()
    listening.shutdown(socket.SHUT_RDWR)
    listening.close()


@pytest.mark.parametrize(
    "fetch",
    [
        lambda: load_tokenizer("no-owner/no-name"),
        lambda: load_config("no-owner/no-name", trust_remote_code=False),
        lambda: find_sources(["no-owner/no-name"]),
        lambda: hub_records("gsm8k"),
        lambda: find_head("no-owner/no-name"),
    ],
    ids=["tokenizer", "target", "data", "questions", "head"],
)
def test_a_hub_that_does_not_answer_is_asked_once(calls: list[int], fetch) -> None:
    for _ in range(2):
        with pytest.raises(UserError, match=r"http://127\.0\.0\.1:\d+ does not answer \(") as caught:
            fetch()
        assert "\n" not in str(caught.value)
        assert len(calls) == 1
    assert not constants.HF_HUB_OFFLINE  # as it was: the network may come back


def test_a_target_that_is_nowhere_may_be_a_directory_that_was_meant(calls: list[int]) -> None:
    with pytest.raises(UserError) as caught:
        load_target("t3", device="cpu")
    words = (
        "t3: could not be loaded as a causal language model: no such directory here, and http://127.0.0.1:"
    )
    assert str(caught.value).startswith(words)
    assert str(caught.value).endswith("; give a hub id, a directory or a .gguf file")


def test_what_lies_on_the_disk_asks_nobody(calls: list[int], tiny_target_dir) -> None:
    load_tokenizer(str(tiny_target_dir))
    load_config(str(tiny_target_dir), trust_remote_code=False)
    assert calls == []


def test_a_name_that_is_never_found_ends_the_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = threading.Event()
    monkeypatch.setattr(hub, "_SECONDS", 0.01)
    monkeypatch.setattr(hub, "_ask", lambda *given: asked.wait())
    hub._silence.cache_clear()
    with hub.asked_once("no-owner/no-name") as silent:
        assert silent is not None
        assert "(within 0.01 seconds)" in silent
        assert constants.HF_HUB_OFFLINE
    asked.set()
    hub._silence.cache_clear()


@pytest.mark.usefixtures("no_hub")
def test_a_name_that_is_nowhere_while_the_hub_is_not_asked_is_told_so(tmp_path) -> None:
    with pytest.raises(UserError, match=r"^t4: .*: no such directory here, and HF_HUB_OFFLINE=1 "):
        load_config("t4", False)
    with pytest.raises(UserError, match=r"^no/such: no tokenizer could be loaded \(HF_HUB_OFFLINE=1 lets"):
        load_tokenizer("no/such")
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(UserError, match=r"no tokenizer could be loaded \(it holds none of its files\); give"):
        load_tokenizer(str(tmp_path))
