"""Records that come with their tokens: `input_ids`, `loss_mask`, and `spans` where answers are adjacent."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from eagle_train.data.records import Skip, TokenRow, category_of, place_of, valid_text
from eagle_train.io.checksums import sha256_json


def read_token_row(record: dict[str, Any], source: str) -> TokenRow:
    """Return the row as it is given. Raises Skip where tokens, mask and spans do not make one."""
    ids, mask = record["input_ids"], record.get("loss_mask")
    if not are_ids(ids) or not ids:
        raise Skip("input_ids is not a list of token ids")
    if not isinstance(mask, list) or len(mask) != len(ids) or any(bit not in (0, 1) for bit in mask):
        raise Skip("loss_mask is not a list of 0 and 1, one per token")
    given = record.get("spans")
    spans = spans_of(mask) if given is None else _checked(given, len(ids))
    if list(mask_of(spans, len(ids))) != [int(bit) for bit in mask]:
        raise Skip("spans and loss_mask disagree")
    if not spans:
        raise Skip("loss_mask supervises nothing")
    if spans[0][0] == 0:
        raise Skip("loss_mask supervises the first token: no prompt before the answer")
    known = record.get("conversation_id")
    return TokenRow(
        conversation_id=sha256_json(ids)[:16] if known is None else valid_text(str(known), "conversation_id"),
        input_ids=tuple(ids),
        spans=tuple(spans),
        source=place_of(source, record.get("id")),
        category=category_of(record),
    )


def _checked(spans: Any, length: int) -> list[tuple[int, int]]:
    """Return spans as pairs in order. Raises Skip for anything else."""
    end = -1
    for span in spans if isinstance(spans, (list, tuple)) else [None]:
        if not isinstance(span, (list, tuple)) or [type(place) for place in span] != [int, int]:
            raise Skip("spans are not pairs [first, last]")
        if not end < span[0] <= span[1] < length:
            raise Skip("spans are not in order, or reach outside the row")
        end = span[1]
    return [(first, last) for first, last in spans]


def spans_of(mask: list[int]) -> list[tuple[int, int]]:
    """Return the runs of ones in `mask` as (first, last), inclusive."""
    spans, first = [], None
    for place, bit in enumerate([*mask, 0]):
        if bit and first is None:
            first = place
        elif not bit and first is not None:
            spans.append((first, place - 1))
            first = None
    return spans


def mask_of(spans: Iterable[tuple[int, int]], length: int) -> bytearray:
    """Return `length` bytes, 1 inside the spans and 0 elsewhere."""
    mask = bytearray(length)
    for first, last in spans:
        mask[first : last + 1] = b"\x01" * (last + 1 - first)
    return mask


def are_ids(value: Any) -> bool:
    """True for a list of token ids."""
    return isinstance(value, list) and all(type(item) is int and 0 <= item < 2**31 for item in value)
