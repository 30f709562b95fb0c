"""A running engine's own counters beside our chain loop's, on the same prompts, greedily.

The engine is a vLLM server (its OpenAI interface and its ``/metrics``, Prometheus text). Its counters are
those of everything that it serves: nobody else should ask it meanwhile.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import re
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from eagle_train.decoding.drafters import Drafter
from eagle_train.decoding.loop import Generation, Settings, generate
from eagle_train.decoding.sampling import Sampling
from eagle_train.decoding.shapes import Chain
from eagle_train.errors import UserError
from eagle_train.evaluation.heads import open_head
from eagle_train.evaluation.methods import head_drafter
from eagle_train.evaluation.questions import Question, conversations, read_questions
from eagle_train.progress import progress
from eagle_train.targets.load import Target, dtype_name, load_target

_SAMPLE = re.compile(
    r"^vllm:spec_decode_num_(drafts|accepted_tokens|accepted_tokens_per_pos)(?:_total)?(\{[^}]*\})? (\S+)",
    re.MULTILINE,
)
_POSITION = re.compile(r'position="(\d+)"')
_SETTLE_SECONDS = 5.0  # counters follow the answer by a moment
_REQUEST_SECONDS = 600.0
_ODD = (KeyError, TypeError, ValueError, AttributeError, IndexError, OverflowError, RecursionError)
Taken = TypeVar("Taken")


@dataclass(frozen=True)
class Counters:
    """vLLM's counters: rounds, accepted guesses (those past a text's end too), the latter by position."""

    drafts: int = 0
    accepted: int = 0
    by_position: tuple[int, ...] = ()

    def __sub__(self, other: Counters) -> Counters:
        """Return what was counted since `other`. Raises ValueError where a counter went down or away."""
        before = other.by_position or (0,) * len(self.by_position)
        if len(before) != len(self.by_position):
            raise ValueError(f"{len(before)} positions before, {len(self.by_position)} now")
        now, then = ((c.drafts, c.accepted) for c in (self, other))
        counted = [a - b for a, b in zip((*now, *self.by_position), (*then, *before), strict=True)]
        if min(counted) < 0:
            raise ValueError("a counter went down")
        return Counters(counted[0], counted[1], tuple(counted[2:]))

    @property
    def figures(self) -> dict[str, Any]:
        """Return acceptance length and rates as vLLM reports them: 1 + accepted / drafts."""
        rounds = self.drafts or 1
        return {
            "drafts": self.drafts,
            "acceptance_length": 1 + self.accepted / rounds,
            "accepted_by_position": [count / rounds for count in self.by_position],
        }


def add_up(parts: Sequence[Counters]) -> Counters:
    """Return the sums of several answers' counters."""
    columns = zip(*(part.by_position for part in parts), strict=True)
    return Counters(
        sum(part.drafts for part in parts), sum(part.accepted for part in parts), tuple(map(sum, columns))
    )


def chain_counters(made: Generation, gamma: int) -> Counters:
    """Return what vLLM would have counted for an answer of our chain loop."""
    uncut = made.accepted_uncut
    return Counters(len(uncut), sum(uncut), tuple(sum(n > i for n in uncut) for i in range(gamma)))


def read_counters(text: str) -> Counters:
    """Read Prometheus text; counters of several engines or models are added up.

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


def _first_model(text: str) -> str:
    name = json.loads(text)["data"][0]["id"]
    if not isinstance(name, str):
        raise TypeError("the id is no text")
    return name


def _token_ids(text: str) -> list[int]:
    ids = json.loads(text)["choices"][0]["token_ids"]
    if not isinstance(ids, list) or not all(type(token) is int and token >= 0 for token in ids):
        raise TypeError("token_ids are no list of numbers")
    return ids


class Engine:
    """A vLLM server at `url`. Every fault of reaching or reading it is a UserError naming the address."""

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/").removesuffix("/v1")
        if not self.url.startswith(("http://", "https://")):
            raise UserError(f"--against-server {url}: wanted an address such as http://localhost:8000")
        self.model = self._read("/v1/models", _first_model, "a list of models")

    def counters(self) -> Counters:
        """Return the counters now. Raises UserError where the server drafts nothing."""
        text = self._get("/metrics")
        if "vllm:spec_decode_num_drafts" not in text:
            raise UserError(
                f"{self.url}/metrics: no vllm:spec_decode counters; wanted a vLLM server that was started "
                "with --speculative-config and without --disable-log-stats"
            )
        found = self._taken("/metrics", text, read_counters, "vLLM's counters")
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
        """Return the greedy continuation's token ids."""
        body = {
            "model": self.model,
            "prompt": list(prompt),
            "temperature": 0.0,
            "max_tokens": max_new_tokens,
            "stop_token_ids": list(eos_ids),
            "return_token_ids": True,
        }
        what = "a completion with token ids (return_token_ids, vLLM 0.11 or later)"
        return self._read("/v1/completions", _token_ids, what, body)

    def _read(
        self, path: str, take: Callable[[str], Taken], what: str, body: dict[str, Any] | None = None
    ) -> Taken:
        return self._taken(path, self._get(path, body), take, what)

    def _taken(self, path: str, text: str, take: Callable[[str], Taken], what: str) -> Taken:
        """Return what `take` finds in a reply; the one place where odd replies become UserError."""
        try:
            return take(text)
        except _ODD as error:
            reason = f"{type(error).__name__}: {error}"[:80]
            raise UserError(
                f"{self.url}{path}: {reason}, in a reply that begins {' '.join(text[:60].split())!r}; wanted "
                f"{what}: is this a vLLM server?"
            ) from error

    def _get(self, path: str, body: dict[str, Any] | None = None) -> str:
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


def compare_with_server(
    head: str | Path,
    target: str | Target,
    url: str,
    questions: str | Path | Sequence[Question] | None = None,
    *,
    max_new_tokens: int = 128,
    num_questions: int | None = None,
    dtype: str = "auto",
    chat_template: str | None = None,
    trust_remote_code: bool = False,
    show: bool = True,
) -> dict[str, Any]:
    """Ask a server and our chain loop the same first turns greedily; return both sides' figures.

    The chain is as long as the server's: its counters have one position for each guess. ``differences`` lists
    every prompt whose ids or counters differ; in float32 on both sides there are none. Raises UserError for
    a server that cannot be used and for whatever else the user must change.
    """
    engine = Engine(url)
    if not isinstance(target, Target):
        target = load_target(target, dtype=dtype, trust_remote_code=trust_remote_code)
    if questions is None or isinstance(questions, str | Path):
        questions = read_questions(questions, num_questions)
    loaded = open_head(head, target)
    settings = Settings(max_new_tokens=max_new_tokens)
    drafter: Drafter | None = None
    sides: list[tuple[Counters, Counters]] = []
    differences, before, tokens = [], engine.settled(), 0
    with progress("against server", len(questions), "prompts", show) as bar:
        for question, conversation in conversations(target.tokenizer, list(questions), chat_template):
            prompt = conversation.ask(0)
            theirs = engine.answer(prompt, max_new_tokens, target.eos_ids)
            after = engine.settled()
            try:
                served, before = after - before, after
            except ValueError as error:
                raise UserError(
                    f"{engine.url}/metrics: {error} since the prompt before; was the server restarted?"
                ) from error
            gamma = len(served.by_position)
            drafter = drafter or head_drafter(loaded, target, Chain(gamma), Sampling())
            made = generate(target, drafter, prompt, settings)
            sides.append((chain_counters(made, gamma), served))
            tokens += len(theirs)
            place = {"question": question.id, "same_text": made.ids == theirs}
            if made.ids != theirs or sides[-1][0] != served:
                counts = {"loop": sides[-1][0].figures, "server": served.figures}
                differences.append({**place, **counts})
            bar.advance(1)
    loop, server = (add_up([side[i] for side in sides]) for i in (0, 1))
    if not server.drafts:
        raise UserError(
            f"{engine.url}/metrics: not one draft was counted in {len(sides)} prompts, so nothing could be "
            "compared; does the server draft, and has --max-new-tokens room for it?"
        )
    return {
        "head": str(head),
        "target": target.name,
        "server": {"url": engine.url, "model": engine.model, **server.figures},
        "loop": {**loop.figures, "dtype": dtype_name(target.dtype)},
        "prompts": len(sides),
        "tokens": tokens,
        "gamma": len(server.by_position),
        "temperature": 0.0,
        "max_new_tokens": max_new_tokens,
        "differences": differences,
    }


def server_fault(report: dict[str, Any]) -> str | None:
    """Return a sentence where ids or counters of server and loop differ anywhere, else None."""
    if not report["differences"]:
        return None
    first = report["differences"][0]
    what = "counters" if first["same_text"] else "text"
    return (
        f"server and loop differ on {len(report['differences'])} of {report['prompts']} prompts; first: "
        f"question {first['question']}, in its {what}"
    )


def server_lines(report: dict[str, Any]) -> list[str]:
    """Return the report of `compare_with_server` as lines of text."""
    found = [
        f"head {report['head']} on {report['target']}: {report['prompts']} prompts, {report['tokens']:,} "
        f"tokens, greedy, chain of {report['gamma']}, up to {report['max_new_tokens']} new tokens"
    ]
    names = {"server": report["server"]["url"], "loop": f"our loop, {report['loop']['dtype']}"}
    for side, name in names.items():
        shares = " ".join(f"{share:.3f}" for share in report[side]["accepted_by_position"])
        found.append(
            f"  {name}: acceptance length {report[side]['acceptance_length']:.3f} in "
            f"{report[side]['drafts']:,} rounds, accepted by position {shares}"
        )
    texts = sum(not difference["same_text"] for difference in report["differences"])
    if report["differences"]:
        found.append(
            f"  {len(report['differences'])} prompts differ, {texts} of them in their text; rounding to half "
            "precision, another head, or other users of the server can explain that"
        )
    else:
        found.append("  every text and every counter equal")
    return found
