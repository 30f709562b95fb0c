"""JSON values read one at a time from a file of any size, with the line each one starts on.

A damaged value is handed over as `Damaged` and reading goes on at the next record that can be found,
so that a file cut off in the middle still gives what is whole in it.
"""

from __future__ import annotations

import codecs
import json
import re
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from io import BufferedReader
from typing import Any

_BLOCK = 1 << 22  # bytes read at a time
_EDGE = 16  # an error this near the end of what was read may only mean that more must be read
_UNREADABLE = (EOFError, OSError, zlib.error)  # what a compressed file raises where it is damaged
_SPACE = re.compile(r"[ \t\r\n\ufeff]*")
_FIRST_KEY = re.compile(r'\{\s*("(?:[^"\\]|\\.)*")\s*:')


@dataclass(frozen=True)
class Damaged:
    """In place of a value: what is wrong with the text at that line."""

    what: str


def read_lines(handle: BufferedReader) -> Iterator[tuple[int, Any]]:
    """Yield (line, value or Damaged) of a JSON-lines file; blank lines and byte-order marks are ignored."""
    number = 0
    try:
        for number, raw in enumerate(handle, start=1):
            text = raw.decode("utf-8", "surrogateescape").strip(" \t\r\n\ufeff")
            if text:
                yield number, _parsed(text)
    except _UNREADABLE as error:
        yield number + 1, Damaged(f"cannot be read further ({error})")


def _parsed(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        return Damaged(f"not valid JSON ({error})")


def read_values(handle: BufferedReader) -> Iterator[tuple[int, Any]]:
    """Yield (line, value or Damaged) of a ``.json`` file.

    The file is one array (its items are the values), or one or more values one after the other.
    """
    stream = _Stream(handle)
    first = stream.peek()
    if first == "[":
        yield from _array_items(stream)
    else:
        while stream.peek():
            yield stream.value()
        if stream.failure and stream.read_whole:
            yield stream.line(), Damaged(f"cannot be read further ({stream.failure})")


def _array_items(stream: _Stream) -> Iterator[tuple[int, Any]]:
    stream.take()
    while True:
        sign = stream.peek()
        if sign == ",":
            stream.take()
        elif sign == "]":
            stream.take()
            if not stream.peek():
                return
            yield stream.line(), Damaged("text after the end of the array")
            stream.seek_record()
        elif not sign:
            if stream.read_whole:
                yield stream.line(), Damaged(f"cut off: {stream.failure or 'the array is not closed'}")
            return
        else:
            yield stream.value()


class _Stream:
    """A window of decoded text over the file: `_text[_place:]` is not yet consumed."""

    def __init__(self, handle: BufferedReader) -> None:
        self._handle = handle
        self._decode = codecs.getincrementaldecoder("utf-8")("surrogateescape").decode
        self._json = json.JSONDecoder()
        self._text, self._place, self._at_end = "", 0, False
        self._line, self._counted = 1, 0
        self._key: str | None = None
        self.read_whole = True
        self.failure = ""

    def line(self) -> int:
        self._line += self._text.count("\n", self._counted, self._place)
        self._counted = self._place
        return self._line

    def peek(self) -> str:
        """Return the next character that is no white space, "" at the end of the file."""
        while True:
            self._place = _SPACE.match(self._text, self._place).end()  # type: ignore[union-attr]
            if self._place < len(self._text):
                return self._text[self._place]
            if not self._more():
                return ""

    def take(self) -> None:
        self._place += 1

    def value(self) -> tuple[int, Any]:
        """Consume one value and return it with its line; on damage go to the next record."""
        line = self.line()
        while True:
            try:
                value, end = self._json.raw_decode(self._text, self._place)
            except json.JSONDecodeError as error:
                unterminated = error.msg.startswith("Unterminated string")
                if (unterminated or error.pos >= len(self._text) - _EDGE) and self._more():
                    continue
                cut_off = self._at_end and (unterminated or error.pos >= len(self._text) - _EDGE)
                return line, self._damaged(error.msg, cut_off)
            except (ValueError, RecursionError) as error:
                return line, self._damaged(str(error), False)
            if end == len(self._text) and self._more():
                continue
            if self._key is None:
                self._key = self._first_key()
            self._place = end
            return line, value

    def seek_record(self) -> None:
        """Move to the next place that opens like a record: an object whose first key is the usual one."""
        key = self._key or self._first_key()
        start = self._place + 1
        if key is not None:
            pattern = re.compile(r"\{\s*" + re.escape(key) + r"\s*:")
            while True:
                found = pattern.search(self._text, start)
                if found:
                    self._place = found.start()
                    return
                if not self._more():
                    break
                start = min(start, self._place + 1)
        self._place = len(self._text)
        self.read_whole = False

    def _damaged(self, message: str, cut_off: bool) -> Damaged:
        what = (
            f"JSON cut off in the middle ({self.failure or message})"
            if cut_off
            else f"not valid JSON ({message})"
        )
        self.seek_record()
        return Damaged(what)

    def _first_key(self) -> str | None:
        found = _FIRST_KEY.match(self._text, self._place)
        return found.group(1) if found else None

    def _more(self) -> bool:
        """Read another block, as large as what is waiting; False at the end of the file."""
        if self._at_end:
            return False
        block = self._read(max(_BLOCK, len(self._text) - self._place))
        self._at_end = not block
        self.line()
        self._text = self._text[self._place :] + self._decode(block, final=self._at_end)
        self._place = self._counted = 0
        return not self._at_end

    def _read(self, size: int) -> bytes:
        """Read about `size` bytes, or what there is before the end or before damage."""
        parts: list[bytes] = []
        while size > 0 and not self.failure:
            try:
                part = self._handle.read1(size)
            except _UNREADABLE as error:
                self.failure = str(error)
                break
            if not part:
                break
            parts.append(part)
            size -= len(part)
        return b"".join(parts)
