"""A small OpenAI-compatible server: answers that follow from the messages alone, and faults on demand.

Started as a process of its own by the tests; it prints the port it listens on, and appends one line of JSON
to its log for every request for an answer.
"""

from __future__ import annotations

import argparse
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


def token_ids(text: str, finished: bool) -> list[int]:
    """Return made-up tokens of an answer."""
    return [10 + ord(letter) % 200 for letter in text] + [END] * finished


class Handler(BaseHTTPRequestHandler):
    """One request. Options of the command line are in `self.server.options`."""

    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        names = self.server.options.models.split(",")  # type: ignore[attr-defined]
        self._send(200, {"data": [{"id": name} for name in names]})

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
        if options.strict and "return_token_ids" in body:
            return self._send(400, {"error": {"message": "Unrecognized request argument: return_token_ids"}})
        if number <= options.gather:
            self.server.barrier.wait(30)  # type: ignore[attr-defined]
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
            choice["token_ids"] = token_ids(text, finished)
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
        content = json.dumps(value).encode()
        self.send_response(status)
        for name, text in {"content-length": str(len(content)), **(headers or {})}.items():
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
    options = parser.parse_args()
    ThreadingHTTPServer.request_queue_size = 256
    ThreadingHTTPServer.daemon_threads = True
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.options, server.lock, server.count, server.running = options, threading.Lock(), 0, 0  # type: ignore[attr-defined]
    server.barrier = threading.Barrier(max(1, options.gather))  # type: ignore[attr-defined]
    with open(options.log, "a") as log:
        server.log = log  # type: ignore[attr-defined]
        print(server.server_address[1], flush=True)
        server.serve_forever()


if __name__ == "__main__":
    main()
