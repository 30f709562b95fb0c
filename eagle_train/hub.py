"""The hub, asked once: where it does not answer, its libraries read their caches alone.

Left to themselves they try again and again for most of a minute before they say so.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from collections.abc import Iterator
from functools import lru_cache
from typing import Any

_SECONDS = 5.0  # for an answer of any kind; HF_HUB_ETAG_TIMEOUT gives another number
_REMEMBERED = 60.0  # seconds; a network may come back while a notebook is open


KEPT_OFFLINE = "HF_HUB_OFFLINE=1 lets nobody ask the hub, and the cache does not hold it"


def is_kept_offline(error: BaseException) -> bool:
    """Return whether `error` came of not asking the hub, as the user wanted, for what no cache holds."""
    from huggingface_hub import constants

    return bool(constants.HF_HUB_OFFLINE) and "couldn't connect to" in str(error)


@contextlib.contextmanager
def asked_once(name: str) -> Iterator[str | None]:
    """Within it nothing waits for a hub that does not answer: what is cached is read, all else fails at once.

    Yields None where the hub answers, or is not to be asked (`name` is a path that is there, or
    ``HF_HUB_OFFLINE=1``), else the reason, in words for the error of whoever misses something.
    """
    silent = None if os.path.exists(name) else _silence(int(time.monotonic() // _REMEMBERED))
    if silent is None:
        yield None
        return
    modules = [sys.modules.get(name) for name in ("huggingface_hub.constants", "datasets.config")]
    held = [(module, module.HF_HUB_OFFLINE) for module in modules if module is not None]
    try:
        _set([(module, True) for module, _ in held])
        yield silent
    finally:
        _set(held)


def _set(values: list[tuple[Any, bool]]) -> None:
    for module, offline in values:
        module.HF_HUB_OFFLINE = offline


@lru_cache(maxsize=1)
def _silence(minute: int) -> str | None:
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE:
        return None
    seconds = constants.HF_HUB_ETAG_TIMEOUT if "HF_HUB_ETAG_TIMEOUT" in os.environ else _SECONDS
    said: list[str | None] = []
    asking = threading.Thread(target=_ask, args=(constants.ENDPOINT, seconds, said), daemon=True)
    asking.start()
    asking.join(seconds)  # looking up a name can take longer, and knows no limit
    why = said[0] if said else f"within {seconds:g} seconds"
    return why and f"{constants.ENDPOINT} does not answer ({why}), and the cache does not hold it"


def _ask(endpoint: str, seconds: float, said: list[str | None]) -> None:
    """Append None where there is any answer, else what went wrong."""
    from huggingface_hub.utils import get_session

    try:
        get_session().head(endpoint, timeout=seconds)
        said.append(None)
    except Exception as error:  # the client's transports each raise kinds of their own
        said.append((str(error).strip() or type(error).__name__).splitlines()[0])
