"""Running engines as servers: who they are, what they answer, and what they counted while answering.

vLLM: its OpenAI interface, and ``/metrics`` (Prometheus text), whose counters are those of everything that it
serves: nobody else should ask it meanwhile. SGLang: ``/generate``, whose reply counts for itself.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import re
import shlex
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from eagle_train.address import is_address
from eagle_train.decoding.shapes import Chain, Dynamic, Shape
from eagle_train.errors import UserError
from eagle_train.evaluation.counters import Counters

_SAMPLE = re.compile(
    r"^vllm:spec_decode_num_(drafts|accepted_tokens|accepted_tokens_per_pos)(?:_total)?(\{[^}]*\})? (\S+)",
    re.MULTILINE,
)
_POSITION = re.compile(r'position="(\d+)"')
_SETTLE_SECONDS = 5.0  # counters follow the answer by a moment
_REQUEST_SECONDS = 600.0
_ODD = (KeyError, TypeError, ValueError, AttributeError, IndexError, OverflowError, RecursionError)
Taken = TypeVar("Taken")


class Server:
    """An address that speaks HTTP. Every fault of reaching or reading it is a UserError that names it."""

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/").removesuffix("/v1")
        if not is_address(self.url):
            raise UserError(
                f"--against-server {shlex.quote(url)}: no address; wanted one such as http://localhost:8000"
            )

    def read(
        self, path: str, take: Callable[[str], Taken], what: str, body: dict[str, Any] | None = None
    ) -> Taken:
        """Return what `take` finds in the reply of `path`, to a POST where there is a body."""
        return self.taken(path, self.get(path, body), take, what)

    def taken(self, path: str, text: str, take: Callable[[str], Taken], what: str) -> Taken:
        """Return what `take` finds in a reply; the one place where odd replies become UserError."""
        try:
            return take(text)
        except _ODD as error:
            reason = f"{type(error).__name__}: {error}"[:80]
            raise UserError(
                f"{self.url}{path}: {reason}, in a reply that begins {' '.join(text[:60].split())!r}; wanted "
                f"{what}: is this a vLLM or an SGLang server?"
            ) from error

    def get(self, path: str, body: dict[str, Any] | None = None) -> str:
        """Return the text of a reply."""
        data = None if body is None else json.dumps(body).encode()
        headers = {"Content-Type": "application/json"} if data else {}
        try:
            request = urllib.request.Request(self.url + path, data=data, headers=headers)
            with urllib.request.urlopen(request, timeout=_REQUEST_SECONDS) as response:
                return response.read().decode("utf-8")
        except urllib.error.HTTPError as error:
            with contextlib.suppress(OSError, http.client.HTTPException):
                said = error.read().decode("utf-8", "replace").strip()[:200]
                raise UserError(f"{self.url}{path}: answered {error.code} {error.reason} ({said})") from error
            raise UserError(f"{self.url}{path}: answered {error.code} {error.reason}") from error
        except (OSError, ValueError, http.client.HTTPException) as error:
            reason = getattr(error, "reason", None) or str(error) or type(error).__name__
            raise UserError(f"{self.url}{path}: cannot be reached ({reason}); is the server up?") from error


def find_engine(url: str) -> Vllm | Sglang:
    """Return the engine that serves at `url`: its list of models says whose it is."""
    server = Server(url)
    model, owner = server.read("/v1/models", _first_model, "a list of models")
    return Sglang(server, model) if owner == "sglang" else Vllm(server, model)


def _first_model(text: str) -> tuple[str, str]:
    first = json.loads(text)["data"][0]
    if not isinstance(first["id"], str):
        raise TypeError("the id is no text")
    return first["id"], str(first.get("owned_by"))


class Vllm:
    """A vLLM server. It drafts chains, as long as its counters have positions."""

    name, counts_as = "vLLM", "1 + accepted / drafts"

    def __init__(self, server: Server, model: str) -> None:
        self.server, self.url, self.model = server, server.url, model
        self._before: Counters | None = None

    def ask(
        self, prompt: Sequence[int], max_new_tokens: int, eos_ids: Sequence[int]
    ) -> tuple[list[int], Counters]:
        """Return the greedy continuation's ids and what was counted for it."""
        before = self.settled() if self._before is None else self._before
        ids = self.answer(prompt, max_new_tokens, eos_ids)
        after = self._before = self.settled()
        try:
            return ids, after - before
        except ValueError as error:
            raise UserError(
                f"{self.url}/metrics: {error} since the prompt before; was the server restarted?"
            ) from error

    def shape(self, counted: Counters) -> Shape:
        """Return how the server drafts."""
        return Chain(len(counted.by_position))

    def figures(self, counted: Counters, tokens: int) -> dict[str, Any]:
        """Return the figures of answers of so many tokens, as the engine defines them."""
        return counted.figures

    def counters(self) -> Counters:
        """Return the counters now. Raises UserError where the server drafts nothing."""
        text = self.server.get("/metrics")
        if "vllm:spec_decode_num_drafts" not in text:
            raise UserError(
                f"{self.url}/metrics: no vllm:spec_decode counters; wanted a vLLM server that was started "
                "with --speculative-config and without --disable-log-stats"
            )
        found = self.server.taken("/metrics", text, read_counters, "vLLM's counters")
        if not found.by_position:
            raise UserError(
                f"{self.url}/metrics: no accepted guesses by position, which tell the chain's length; wanted "
                "a vLLM server that drafts chains"
            )
        return found

    def settled(self) -> Counters:
        """Return the counters once two readings agree."""
        last, deadline = self.counters(), time.monotonic() + _SETTLE_SECONDS
        while time.monotonic() < deadline:
            time.sleep(0.1)
            now = self.counters()
            if now == last:
                break
            last = now
        return last

    def answer(self, prompt: Sequence[int], max_new_tokens: int, eos_ids: Sequence[int]) -> list[int]:
        """Return the greedy continuation's ids, whatever the target's own files ask of the server."""
        body = {
            "model": self.model,
            "prompt": list(prompt),
            "temperature": 0.0,
            "repetition_penalty": 1.0,
            "max_tokens": max_new_tokens,
            "stop_token_ids": list(eos_ids),
            "return_token_ids": True,
        }
        what = "a completion with token ids (return_token_ids, vLLM 0.11 or later)"
        return self.server.read("/v1/completions", _completion, what, body)


def _completion(text: str) -> list[int]:
    return _token_ids(json.loads(text)["choices"][0]["token_ids"])


def read_counters(text: str) -> Counters:
    """Read vLLM's Prometheus text; counters of several engines or models are added up.

    Raises ValueError, OverflowError or KeyError for a number or a position that no counter has.
    """
    sums: dict[str, int] = {}
    positions: dict[int, int] = {}
    for name, labels, value in _SAMPLE.findall(text):
        count = int(float(value))
        if count < 0:
            raise ValueError(f"{name} is {value}")
        if not name.endswith("_per_pos"):
            sums[name] = sums.get(name, 0) + count
        elif found := _POSITION.search(labels):
            positions[int(found[1])] = positions.get(int(found[1]), 0) + count
    by_position = tuple(positions[at] for at in range(len(positions)))
    return Counters(sums.get("drafts", 0), sums.get("accepted_tokens", 0), by_position)


class Sglang:
    """An SGLang server. Its settings tell the draft's shape: a chain, or EAGLE-2's tree."""

    name, counts_as = "SGLang", "completion tokens / verifications"

    def __init__(self, server: Server, model: str) -> None:
        self.server, self.url, self.model = server, server.url, model
        self._shape = server.read("/server_info", self._read_shape, "SGLang's settings")

    def _read_shape(self, text: str) -> Shape:
        info = json.loads(text)
        method, where = info["speculative_algorithm"], f"{self.url}/server_info"
        if method not in ("EAGLE", "EAGLE3"):
            raise UserError(
                f"{where}: speculative_algorithm is {method}, wanted EAGLE or EAGLE3; start the server with "
                "--speculative-algorithm and --speculative-draft-model-path"
            )
        if info.get("speculative_adaptive"):
            raise UserError(
                f"{where}: speculative_adaptive changes the draft's length on the way; start without it"
            )
        steps, top_k, nodes = (
            info[f"speculative_{name}"] for name in ("num_steps", "eagle_topk", "num_draft_tokens")
        )
        return Chain(steps) if top_k == 1 else Dynamic(nodes, top_k, steps)

    def shape(self, counted: Counters) -> Shape:
        """Return how the server drafts."""
        return self._shape

    def figures(self, counted: Counters, tokens: int) -> dict[str, Any]:
        """Return the figures of answers of so many tokens, as the engine defines them."""
        return {**counted.figures, "acceptance_length": tokens / (counted.drafts or 1)}

    def ask(
        self, prompt: Sequence[int], max_new_tokens: int, eos_ids: Sequence[int]
    ) -> tuple[list[int], Counters]:
        """Return the greedy continuation's ids and what was counted for it."""
        sampling = {
            "temperature": 0.0,
            "repetition_penalty": 1.0,
            "max_new_tokens": max_new_tokens,
            "stop_token_ids": list(eos_ids),
        }
        body = {"input_ids": list(prompt), "sampling_params": sampling}
        what = "ids and, in meta_info, spec_verify_ct and spec_correct_drafts_histogram"
        return self.server.read("/generate", self._read_answer, what, body)

    def _read_answer(self, text: str) -> tuple[list[int], Counters]:
        """Read one reply. An answer of the prefill's token alone was never verified: nothing is counted."""
        reply = json.loads(text)
        ids, meta = _token_ids(reply["output_ids"]), reply["meta_info"]
        depth = int(self._shape.figures["depth"])  # type: ignore[call-overload]
        if len(ids) == 1 and "spec_verify_ct" not in meta:
            return ids, Counters.of_histogram([], depth)
        histogram = _token_ids(meta["spec_correct_drafts_histogram"])  # rounds by accepted guesses
        found = Counters.of_histogram(histogram, depth)
        said = (meta["spec_verify_ct"], meta["spec_num_correct_drafts"])
        if said != (found.drafts, found.accepted) or len(histogram) > depth + 1:
            raise ValueError(f"verifications and guesses {said}, histogram {histogram} at a depth of {depth}")
        return ids, found


def _token_ids(ids: Any) -> list[int]:
    if not isinstance(ids, list) or not all(type(token) is int and token >= 0 for token in ids):
        raise TypeError("no list of whole numbers where token ids or counts belong")
    return ids
