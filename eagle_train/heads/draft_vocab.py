"""Which target tokens an EAGLE-3 head can draft: the most frequent ones on supervised positions."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from eagle_train.errors import UserError


def choose_draft_ids(
    frequencies: Mapping[int, int] | Mapping[str, int], vocab_size: int, size: int
) -> Tensor:
    """Return exactly `size` target ids [D] int64, ascending.

    The most frequent come first, ties by id; when fewer distinct tokens occur, the lowest unused ids
    fill up. `frequencies` maps token id to its count. Raises UserError for an impossible size or for
    ids outside the vocabulary.
    """
    if not 1 <= size <= vocab_size:
        raise UserError(f"draft vocabulary: size {size}, wanted 1 to the target's {vocab_size}")
    counts = {int(token): int(count) for token, count in frequencies.items() if int(count) > 0}
    if outside := [token for token in counts if not 0 <= token < vocab_size]:
        raise UserError(
            f"draft vocabulary: token {outside[0]} occurs, but the target has {vocab_size} tokens; "
            "were these rows prepared for another target?"
        )
    kept = sorted(counts, key=lambda token: (-counts[token], token))[:size]
    if len(kept) < size:
        unused = (token for token in range(vocab_size) if token not in counts)
        kept += [next(unused) for _ in range(size - len(kept))]
    return torch.tensor(sorted(kept), dtype=torch.int64)


def coverage(draft_ids: Tensor, frequencies: Mapping[int, int] | Mapping[str, int]) -> float:
    """Return the share of supervised tokens that can be drafted, 1.0 when there are none."""
    kept = set(draft_ids.tolist())
    total = sum(frequencies.values())
    return sum(n for token, n in frequencies.items() if int(token) in kept) / total if total else 1.0


def membership(draft_ids: Tensor, vocab_size: int) -> Tensor:
    """Return t2d, [V] bool: true where a target id can be drafted."""
    mask = torch.zeros(vocab_size, dtype=torch.bool, device=draft_ids.device)
    mask[draft_ids] = True
    return mask


def to_draft(draft_ids: Tensor, vocab_size: int) -> Tensor:
    """Return the draft id of each target id, [V] int64: -1 where it cannot be drafted."""
    table = torch.full((vocab_size,), -1, device=draft_ids.device)
    table[draft_ids] = torch.arange(len(draft_ids), device=draft_ids.device)
    return table


def to_offsets(draft_ids: Tensor) -> Tensor:
    """Return d2t as engines store it: the offset of each draft id to its target id, [D] int64."""
    return draft_ids - torch.arange(len(draft_ids), device=draft_ids.device)


def from_offsets(d2t: Tensor, t2d: Tensor | None, vocab_size: int, where: str) -> Tensor:
    """Return the target ids behind stored offsets; UserError where they contradict t2d or the vocabulary."""
    for name, table in (("d2t", d2t), ("t2d", t2d)):
        if table is not None and (table.ndim != 1 or table.is_floating_point() or table.is_complex()):
            raise UserError(
                f"{where}: {name} is {table.dtype} {list(table.shape)}, wanted a row of integers; "
                "fetch or export the head again"
            )
    ids = d2t.long() + torch.arange(len(d2t))
    if len(ids) and not (int(ids.min()) >= 0 and int(ids.max()) < vocab_size):
        raise UserError(
            f"{where}: d2t leads outside the target's {vocab_size} tokens; the map is another target's"
        )
    if len(set(ids.tolist())) != len(ids):
        raise UserError(f"{where}: d2t names a target token twice; the map is damaged")
    if t2d is not None and not torch.equal(membership(ids, vocab_size), t2d.bool()):
        raise UserError(f"{where}: d2t and t2d name different tokens; the map is damaged")
    return ids
