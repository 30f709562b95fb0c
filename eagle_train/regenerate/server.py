"""Answers made by an OpenAI-compatible server (vLLM, SGLang), many conversations at once."""

from __future__ import annotations

import asyncio
import os
import random
import shlex
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import httpx

from eagle_train.address import is_address
from eagle_train.data.answer_ids import say
from eagle_train.data.templates import Arguments
from eagle_train.data.tokenizer import load_tokenizer
from eagle_train.errors import UserError, nearest
from eagle_train.progress import Progress
from eagle_train.provenance import tokenizer_fingerprint
from eagle_train.regenerate.answers import Answer, AnswerSettings, Asked, without_thinking
from eagle_train.regenerate.failures import Failures
from eagle_train.regenerate.replies import (
    Malformed,
    Refused,
    answer_in,
    models_in,
    read_reply,
    short,
    text_of,
)
from eagle_train.regenerate.work import Work

_LATER = (408, 409, 425, 429, 500, 502, 503, 504)
_FIRST_PAUSE, _LONGEST_PAUSE = 0.5, 30.0  # seconds
_LONGEST = 24 * 60 * 60
_LIST_TIMEOUT = 30.0  # seconds
_NAMED = 5  # models in an error
_FAULTS = (Malformed, asyncio.TimeoutError, httpx.HTTPError, httpx.InvalidURL, ValueError)
_IDS = "return_token_ids"  # vLLM's field; other servers know no such thing


@dataclass(frozen=True)
class Server:
    """Where to ask. `model` is the name it serves the target by, None for the target's own or its only one.

    `tries` of one request, each of at most `timeout` seconds up to the end of its reply; `api_key_env` names
    the environment variable that holds its key.
    """

    url: str
    model: str | None = None
    in_flight: int = 256
    tries: int = 6
    timeout: float = 600.0
    api_key_env: str | None = None

    def __post_init__(self) -> None:
        if not is_address(self.url):
            raise UserError(f"--server {shlex.quote(self.url)}: wanted a URL such as http://localhost:8000")
        if self.in_flight < 1:
            raise UserError(f"--in-flight {self.in_flight}: wanted 1 or more")
        if self.tries < 1:
            raise UserError(f"--tries {self.tries}: wanted 1 or more")
        if not 0 < self.timeout <= _LONGEST:
            raise UserError(
                f"--timeout {self.timeout:g}: wanted more than 0 seconds, at most {_LONGEST} (a day)"
            )

    @property
    def base(self) -> str:
        """The address that paths such as ``/chat/completions`` are put behind."""
        plain = self.url.rstrip("/")
        return plain if plain.endswith("/v1") else plain + "/v1"

    def headers(self) -> dict[str, str]:
        """Return the headers of every request. Raises UserError where the key is not there."""
        if self.api_key_env is None:
            return {}
        key = os.environ.get(self.api_key_env)
        if not key:
            raise UserError(f"--api-key-env {self.api_key_env}: no such environment variable, or it is empty")
        return {"Authorization": f"Bearer {key}"}


class ServerAnswers:
    """A server and how it is asked. `generated_by` is what the output says of both."""

    def __init__(
        self,
        server: Server,
        target: str,
        settings: AnswerSettings,
        template_arguments: Arguments | None,
        trust_remote_code: bool = False,
    ) -> None:
        self.server, self.settings = server, settings
        self.template_arguments = dict(template_arguments or {})
        self.model = _served_model(server, target)
        self._tokenizer = _tokenizer(target, trust_remote_code)
        self._asks_ids = self._tokenizer is not None and settings.keep_thinking
        self._ends = _special_ids(self._tokenizer)
        self.ids_dropped = 0  # answers whose ids are not tokens of their text
        fingerprint = None if self._tokenizer is None else tokenizer_fingerprint(self._tokenizer)
        self.generated_by: dict[str, Any] = {
            "model": self.model,
            "server": "openai-compatible",
            "tokenizer_fingerprint": fingerprint,
            "template_arguments": self.template_arguments,
            **settings.record(),
        }

    def run(self, asked: list[Asked], work: Work, failures: Failures, bar: Progress) -> None:
        """Make every answer that `work` lacks, `in_flight` conversations at a time."""
        asyncio.run(self._run(asked, work, failures, bar))
        if self.ids_dropped:
            print(
                f"{self.ids_dropped:,} answers are kept as text: the token ids that the server sent with "
                "them are not tokens of their text",
                file=sys.stderr,
            )

    async def _run(self, asked: list[Asked], work: Work, failures: Failures, bar: Progress) -> None:
        queue = iter(asked)
        limits = httpx.Limits(max_connections=self.server.in_flight)
        timeout = httpx.Timeout(self.server.timeout, connect=min(10.0, self.server.timeout), pool=None)
        async with httpx.AsyncClient(limits=limits, timeout=timeout, headers=self.server.headers()) as client:
            workers = [
                asyncio.create_task(self._worker(client, queue, work, failures, bar))
                for _ in range(min(self.server.in_flight, len(asked)))
            ]
            try:
                await asyncio.gather(*workers)
            finally:
                for worker in workers:
                    worker.cancel()
                await asyncio.gather(*workers, return_exceptions=True)

    async def _worker(
        self,
        client: httpx.AsyncClient,
        queue: Iterator[Asked],
        work: Work,
        failures: Failures,
        bar: Progress,
    ) -> None:
        """Take conversations one after the other, and answer each turn by turn."""
        for conversation in queue:
            answers = work.answers(conversation)
            while work.wanted(conversation, answers):
                turn = len(answers)
                messages = conversation.messages(turn, [answer.message() for answer in answers])
                try:
                    answer = await self._ask(client, self._body(conversation, turn, messages))
                except Refused as reason:
                    failures.add(conversation, turn, str(reason))
                    break
                work.put((conversation.row_id, turn), answer)
                answers.append(answer)
                bar.advance(1)

    def _body(self, asked: Asked, turn: int, messages: list[dict[str, Any]]) -> dict[str, Any]:
        settings = self.settings
        body: dict[str, Any] = {
            "model": self.model,
            "messages": messages,
            "max_tokens": settings.max_new_tokens,
            "temperature": settings.temperature,
        }
        if settings.temperature:
            body |= {"top_p": settings.top_p, "seed": settings.seed_of(asked.row_id, turn)}
        if asked.conversation.tools:
            body["tools"] = list(asked.conversation.tools)
        if self.template_arguments:
            body["chat_template_kwargs"] = self.template_arguments
        return body

    async def _ask(self, client: httpx.AsyncClient, body: dict[str, Any]) -> Answer:
        """Return one answer, trying again with longer and longer pauses while the fault may pass."""
        pause = _FIRST_PAUSE
        for attempt in range(1, self.server.tries + 1):
            wait = pause * random.uniform(0.5, 1.0)
            try:
                response = await asyncio.wait_for(self._post(client, body), self.server.timeout)
                if response.status_code == 200:
                    return self._answer(response)
                fault = f"status {response.status_code}: {short(text_of(response.content))}"
                if response.status_code not in _LATER:
                    raise Refused(fault)
                wait = max(wait, _retry_after(response))
            except _FAULTS as error:
                fault = _told(error, self.server.timeout)
            if attempt < self.server.tries:
                await asyncio.sleep(wait)
                pause = min(2 * pause, _LONGEST_PAUSE)
        raise Refused(f"{fault} (after {self.server.tries} tries)")

    async def _post(self, client: httpx.AsyncClient, body: dict[str, Any]) -> httpx.Response:
        """Send one request, asking for token ids as long as the server does not mind."""
        address = self.server.base + "/chat/completions"
        if self._asks_ids:
            response = await client.post(address, json={**body, _IDS: True})
            if response.status_code not in (400, 422) or _IDS not in text_of(response.content):
                return response
            self._asks_ids = False
        return await client.post(address, json=body)

    def _answer(self, response: httpx.Response) -> Answer:
        """Read an answer. Raises Malformed where there is none, Refused where there never will be."""
        answer = read_reply(response.content, answer_in)
        if answer.answer_ids is not None and not self._are_of(answer):
            self.ids_dropped += self._asks_ids
            answer = replace(answer, answer_ids=None)
        return answer if self.settings.keep_thinking else without_thinking(answer)

    def _are_of(self, answer: Answer) -> bool:
        """True when the ids a server sent end as the record wants them, and say what the answer says."""
        ids = answer.answer_ids
        if self._tokenizer is None or not ids or (ids[-1] in self._ends) != answer.finished:
            return False
        calls = answer.tool_calls or ()
        return say(self._tokenizer, ids, answer.finished, answer.content, answer.reasoning, calls)


def _special_ids(tokenizer: Any) -> set[int]:
    if tokenizer is None:
        return set()
    return {number for number, token in tokenizer.added_tokens_decoder.items() if token.special}


def _told(error: Exception, timeout: float) -> str:
    """Return what a failed try came to, in one line."""
    if isinstance(error, Malformed):
        return str(error)
    if isinstance(error, asyncio.TimeoutError):
        return f"no whole reply in {timeout:g} seconds"
    return f"{type(error).__name__}: {short(str(error))}".rstrip(": ")


def _retry_after(response: httpx.Response) -> float:
    try:
        return min(float(response.headers.get("retry-after", 0)), _LONGEST_PAUSE)
    except ValueError:  # a date
        return 0.0


def _served_model(server: Server, target: str) -> str:
    """Return the name by which the server knows the target. Raises UserError where it does not answer."""
    names = _served_models(server)
    wanted = server.model or target
    if wanted in names:
        return wanted
    if server.model is None and len(names) == 1:
        return names[0]
    raise UserError(
        f"--server {server.url}: serves {_listed(names)}, wanted {wanted}; name one with "
        f"--served-model{nearest(wanted, names)}"
    )


def _listed(names: list[str]) -> str:
    more = f" and {len(names) - _NAMED:,} more" if len(names) > _NAMED else ""
    return (", ".join(map(short, names[:_NAMED])) or "no model") + more


def _served_models(server: Server) -> list[str]:
    address, tries = server.base + "/models", min(3, server.tries)
    seconds = min(_LIST_TIMEOUT, server.timeout)
    for attempt in range(1, tries + 1):
        try:
            response = asyncio.run(_get(address, server.headers(), seconds))
            response.raise_for_status()
            return read_reply(response.content, models_in)
        except _FAULTS as error:
            if attempt == tries or isinstance(error, (Malformed, ValueError, httpx.InvalidURL)):
                raise UserError(
                    f"--server {server.url}: {address} gives no list of models ({_told(error, seconds)}); "
                    "start the server, or correct the URL"
                ) from error
        time.sleep(_FIRST_PAUSE * attempt)
    raise AssertionError("unreachable")


async def _get(address: str, headers: dict[str, str], seconds: float) -> httpx.Response:
    """Return a whole reply. Raises asyncio.TimeoutError where it takes longer than `seconds`."""
    async with httpx.AsyncClient(timeout=seconds, headers=headers) as client:
        return await asyncio.wait_for(client.get(address), seconds)


def _tokenizer(target: str, trust_remote_code: bool) -> Any:
    """Return the target's tokenizer, None where there is none here: then token ids are of no use."""
    try:
        return load_tokenizer(target, trust_remote_code)
    except UserError as error:
        print(f"answers are kept as text, without token ids: {error}", file=sys.stderr)
        return None
