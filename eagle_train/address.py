"""Addresses of servers."""

from __future__ import annotations

from urllib.parse import urlsplit


def is_address(url: str) -> bool:
    """True where `url` names a host over HTTP, and a port that there can be, if any; paths may follow."""
    if not url.isprintable() or " " in url:
        return False
    try:
        parts = urlsplit(url)
        return (
            parts.scheme in ("http", "https")
            and bool(parts.hostname)
            and parts.port != 0
            and not (parts.query or parts.fragment)
        )
    except ValueError:  # brackets that do not close, a port above 65,535
        return False
