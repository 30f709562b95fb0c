"""SHA-256 of bytes, JSON values and files."""

from __future__ import annotations

import hashlib
import json
import os
from typing import Any


def sha256_bytes(content: bytes) -> str:
    """Return the hexadecimal SHA-256 of `content`."""
    return hashlib.sha256(content).hexdigest()


def sha256_json(value: Any) -> str:
    """Return the SHA-256 of a JSON value, independent of key order and spacing."""
    text = json.dumps(value, sort_keys=True, ensure_ascii=True, separators=(",", ":"))
    return sha256_bytes(text.encode())


def sha256_file(path: str | os.PathLike[str]) -> str:
    """Return the hexadecimal SHA-256 of a file's bytes, read in pieces of 1 MiB."""
    digest = hashlib.sha256()
    with open(path, "rb") as handle:
        while piece := handle.read(1 << 20):
            digest.update(piece)
    return digest.hexdigest()
