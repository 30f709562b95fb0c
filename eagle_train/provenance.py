"""Who made a record: tool version and fingerprints of the things it depends on."""

from __future__ import annotations

from importlib import metadata
from typing import Any

from eagle_train.io.checksums import sha256_json


def tool_version() -> str:
    """Return the installed version of eagle, or ``unknown`` when run from a bare source tree."""
    try:
        return metadata.version("eagle-train")
    except metadata.PackageNotFoundError:
        return "unknown"


def tokenizer_fingerprint(tokenizer: Any) -> str:
    """Return 16 hex digits that agree exactly when two tokenizers map text to ids alike.

    Covers the whole serialised tokenizer where there is one (vocabulary, merges, normaliser), else the
    vocabulary, and the special tokens; not whether it cuts or pads, which every call may change. The chat
    template has its own fingerprint.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is not None and (backend.truncation or backend.padding):
        backend = type(backend).from_str(backend.to_str())
        backend.no_truncation()
        backend.no_padding()
    body = backend.to_str() if backend is not None else sorted(tokenizer.get_vocab().items())
    special = {name: str(token) for name, token in sorted(tokenizer.special_tokens_map.items())}
    return sha256_json([body, special])[:16]


def text_fingerprint(text: str) -> str:
    """Return 16 hex digits for a text, such as a chat template."""
    return sha256_json(text)[:16]
