"""Ctrl-C and SIGTERM ask the loop to stop at the end of its step, where everything can be saved."""

from __future__ import annotations

import signal
import threading
import time
from types import FrameType, TracebackType
from typing import Any


class Interrupt:
    """While entered, `asked` turns true at the first signal. Ctrl-C again a second later stops at once."""

    def __init__(self) -> None:
        self.asked = False
        self._asked_at = 0.0
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Interrupt:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self._before[number] = signal.signal(number, self._ask)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _ask(self, number: int, frame: FrameType | None) -> None:
        # A launcher passes on a Ctrl-C that the terminal has sent to every process already.
        if number == signal.SIGINT and self.asked and time.monotonic() - self._asked_at > 1.0:
            raise KeyboardInterrupt
        if not self.asked:
            self.asked, self._asked_at = True, time.monotonic()
