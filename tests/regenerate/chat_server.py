"""A small OpenAI-compatible server: answers that follow from the messages alone, and faults on demand.

Started as a process of its own by the tests; it prints the port it listens on, and appends one line of JSON
to its log for every request for an answer.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import random
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

END = 2  # <|im_end|> of the tests' tokenizer


def reply(messages: list[dict[str, Any]]) -> tuple[str, bool]:
    """Return the one answer to these messages, and whether it is finished."""
    said = json.dumps([[message["role"], message["content"]] for message in messages])
    digest = hashlib.sha256(said.encode()).hexdigest()
    return f"{len(messages)} messages, {digest[:12]}.", int(digest, 16) % 4 != 0


def token_ids(text: str, finished: bool, tokenizer: Any) -> list[int]:
    """Return the tokens of an answer, letter by letter as a tokeniser would not take them."""
    letters = [tokenizer.encode(letter).ids for letter in text]
    return [number for ids in letters for number in ids] + [END] * finished


def _said(**odd: Any) -> bytes:
    """Return a reply in which `odd` stands in the place of what belongs there."""
    message = {"role": "assistant", "content": "x"}
    choice = {"message": {**message, **odd.pop("message", {})}, "finish_reason": "stop", **odd}
    return json.dumps({"choices": [choice]}).encode()


NESTED = b"[" * 200_000
PLAIN = {"content-type": "application/json"}
ODD: dict[str, tuple[int, dict[str, str], bytes]] = {
    "reason is a list": (200, PLAIN, _said(finish_reason=["stop"])),
    "reason is an object": (200, PLAIN, _said(finish_reason={})),
    "text is a number": (200, PLAIN, _said(message={"content": 5})),
    "text is a list": (200, PLAIN, _said(message={"content": ["x"]})),
    "thought is a number": (200, PLAIN, _said(message={"reasoning_content": 5})),
    "calls are a number": (200, PLAIN, _said(message={"tool_calls": 5})),
    "calls are numbers": (200, PLAIN, _said(message={"tool_calls": [5]})),
    "message is a list": (200, PLAIN, b'{"choices": [{"message": [], "finish_reason": "stop"}]}'),
    "a number": (200, PLAIN, b"5"),
    "no choices": (200, PLAIN, b'{"choices": {}}'),
    "nothing": (200, PLAIN, b""),
    "nested": (200, PLAIN, NESTED),
    "a nested reason": (200, PLAIN, b'{"choices": [{"message": {}, "finish_reason": ' + NESTED),
    "not packed": (200, {**PLAIN, "content-encoding": "gzip"}, _said()),
    "no Unicode": (200, PLAIN, b'{"choices": "\xff\xfe"}'),
    "rot13": (400, {"content-type": "text/plain; charset=rot13"}, b"no"),
    "no such charset": (400, {"content-type": "text/plain; charset=\x00"}, b"no"),
    "packed refusal": (400, {**PLAIN, "content-encoding": "gzip"}, b"no"),
    "waits for ever": (503, {**PLAIN, "retry-after": "nan"}, b"no"),
}


class Handler(BaseHTTPRequestHandler):
    """One request. Options of the command line are in `self.server.options`."""

    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        if self.server.options.models == "nested":  # type: ignore[attr-defined]
            return self._send_raw(200, PLAIN, NESTED)
        names = self.server.options.models.split(",")  # type: ignore[attr-defined]
        return self._send(200, {"data": [{"id": name} for name in names]})

    def do_POST(self) -> None:
        options = self.server.options  # type: ignore[attr-defined]
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        with self.server.lock:  # type: ignore[attr-defined]
            self.server.count += 1  # type: ignore[attr-defined]
            number = self.server.count  # type: ignore[attr-defined]
            self.server.running += 1  # type: ignore[attr-defined]
            entry = {"number": number, "running": self.server.running, "path": self.path}  # type: ignore[attr-defined]
            entry["key"] = self.headers.get("authorization")
            self.server.log.write(json.dumps({**entry, "body": body}) + "\n")  # type: ignore[attr-defined]
            self.server.log.flush()  # type: ignore[attr-defined]
        try:
            self._answer(options, body, number)
        finally:
            with self.server.lock:  # type: ignore[attr-defined]
                self.server.running -= 1  # type: ignore[attr-defined]

    def _answer(self, options: argparse.Namespace, body: dict[str, Any], number: int) -> None:
        if body["messages"][-1]["content"].startswith("FAIL"):
            return self._send(400, {"error": {"message": "this prompt is not to my taste"}})
        if body["messages"][-1]["content"].startswith("ODD "):
            return self._send_raw(*ODD[body["messages"][-1]["content"][4:]])
        if body["messages"][-1]["content"].startswith("DRIP"):
            return self._drip()
        if options.strict and "return_token_ids" in body:
            return self._send(400, {"error": {"message": "Unrecognized request argument: return_token_ids"}})
        if number <= options.gather:
            self.server.barrier.wait(300)  # type: ignore[attr-defined]
        time.sleep(random.Random(number).uniform(0, 2 * options.delay))
        if options.faults and number % 2:
            return self._fault(number // 2 % 5)
        text, finished = reply(body["messages"])
        message: dict[str, Any] = {"role": "assistant", "content": text}
        if options.thinking == "field":
            message["reasoning_content"] = "Hm."
        elif options.thinking == "text":
            message["content"] = f"<think>\nHm.\n</think>\n\n{text}"
        choice = {"index": 0, "message": message, "finish_reason": "stop" if finished else "length"}
        if body.get("return_token_ids"):
            choice["token_ids"] = self.server.ids_of(text, finished)  # type: ignore[attr-defined]
        return self._send(200, {"choices": [choice]})

    def _fault(self, kind: int) -> None:
        if kind == 0:
            self.close_connection = True
            self.connection.close()
        elif kind == 1:
            self._send(429, {"error": {"message": "slow down"}}, {"retry-after": "0.01"})
        elif kind == 2:
            self._send(500, {"error": {"message": "out of luck"}})
        elif kind == 3:
            self._send(200, {"choices": []})
        else:
            self._send(200, {"choices": [{"message": {"content": "x"}, "finish_reason": "abort"}]})

    def _send(self, status: int, value: Any, headers: dict[str, str] | None = None) -> None:
        self._send_raw(status, headers or {}, json.dumps(value).encode())

    def _drip(self) -> None:
        """Send a piece every now and then, until nobody listens."""
        self.send_response(200)
        self.send_header("transfer-encoding", "chunked")
        self.end_headers()
        with contextlib.suppress(OSError):
            while True:
                self.wfile.write(b"1\r\n \r\n")
                time.sleep(0.05)
        self.close_connection = True

    def _send_raw(self, status: int, headers: dict[str, str], content: bytes) -> None:
        self.send_response(status)
        for name, text in {"content-length": str(len(content)), **headers}.items():
            self.send_header(name, text)
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *arguments: Any) -> None:
        """Keep quiet."""


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--log", required=True)
    parser.add_argument("--models", default="tiny")
    parser.add_argument("--delay", type=float, default=0.0)
    parser.add_argument("--faults", action="store_true")
    parser.add_argument("--strict", action="store_true")
    parser.add_argument("--gather", type=int, default=0, help="answer none of so many before all are there")
    parser.add_argument("--thinking", choices=("no", "field", "text"), default="no")
    parser.add_argument("--ids", default="[5, 6, 2]", help="a tokenizer.json, or the ids of every answer")
    options = parser.parse_args()
    if options.ids.startswith("["):
        same = json.loads(options.ids)
        ids_of = lambda text, finished: same if finished else same[:-1]  # noqa: E731
    else:
        from tokenizers import Tokenizer

        tokenizer = Tokenizer.from_file(options.ids)
        ids_of = lambda text, finished: token_ids(text, finished, tokenizer)  # noqa: E731
    ThreadingHTTPServer.request_queue_size = 256
    ThreadingHTTPServer.daemon_threads = True
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.options, server.lock, server.count, server.running = options, threading.Lock(), 0, 0  # type: ignore[attr-defined]
    server.ids_of = ids_of  # type: ignore[attr-defined]
    server.barrier = threading.Barrier(max(1, options.gather))  # type: ignore[attr-defined]
    with open(options.log, "a") as log:
        server.log = log  # type: ignore[attr-defined]
        print(server.server_address[1], flush=True)
        server.serve_forever()


if __name__ == "__main__":
    main()
