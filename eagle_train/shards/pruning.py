"""Shards taken out of a directory: everything is read and checked first, files go last."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from eagle_train.errors import UserError
from eagle_train.shards.checking import Expected, listed, listing_faults, planned, shard_faults, told
from eagle_train.shards.files import ShardFile, open_shard
from eagle_train.shards.listing import find_manifest
from eagle_train.shards.manifest import SAME, head_of, joined_plan, write_manifest
from eagle_train.shards.reader import open_shards
from eagle_train.shards.schema import INDEX, MANIFEST, PLAN, mend, shard_name, shard_number


def prune(
    folder: str | Path,
    *,
    shards: Iterable[int] = (),
    rows: Iterable[str] = (),
    damaged: bool = False,
    show: bool = True,
) -> dict[str, Any]:
    """Remove shards by the number in their name, by the ids of rows in them, or those that are damaged.

    The directory then holds the others, and the same extraction makes the removed ones anew. Everything is
    read and checked first; index and manifest of the kept shards are written before the first file goes, so
    the same command goes on after a kill. Returns what it holds, with ``removed``. Raises UserError, before
    anything is changed, for a number or a row that is not there and where damaged shards would stay.
    """
    place = Path(folder)
    info = find_manifest(place)
    expected = listed(info) if info else planned(place)
    there = expected | (_unlisted(place, expected) if info else {})
    removed = {shard_name(number) for number in shards}
    if absent := removed - set(there):
        raise UserError(f"--shard {shard_number(min(absent))}: {place} holds no {min(absent)}")
    faults = shard_faults(place, there, show) if damaged or info else {}
    removed |= _shards_with(place, [name for name in there if name not in faults], set(rows))
    removed |= set(faults) if damaged else set()
    kept = [name for name in expected if name not in removed]
    if info and (bad := [faults[name] for name in kept if name in faults]):
        raise UserError(f"{bad[0].rsplit('; ', 1)[0]}; it would stay: give --damaged too")
    if info and not kept and not (place / PLAN).is_file():
        raise UserError(f"{place}: no whole shard would be left, and {mend(place)}; or delete the folder")
    _change(place, info, [open_shard(place / name) for name in kept], sorted(removed))
    return {
        "folder": str(place),
        "removed": sorted(removed),
        "shards": len(kept),
        "extract_again": (place / PLAN).is_file(),
    }


def _change(place: Path, info: dict[str, Any] | None, kept: Sequence[ShardFile], removed: list[str]) -> None:
    """Write index and manifest over the kept shards where they change, then remove the others."""
    names = [shard.path.name for shard in kept]
    stale = info is not None and (
        names != list(listed(info))
        or bool(told(lambda: open_shards(place)) or listing_faults(place, info, kept))
    )
    if (removed or stale) and not os.access(place, os.W_OK):
        raise UserError(f"{place}: read-only; prune changes the folder: make it writable, or copy it")
    gone = list(removed)
    if info is not None and kept and stale:
        write_manifest(place, _head_over(info, kept), kept)
    elif not kept:
        gone = [MANIFEST, INDEX, *removed]
    for name in gone:
        try:
            (place / name).unlink(missing_ok=True)
        except OSError as error:
            raise UserError(f"{place / name}: {error.strerror}; prune cannot remove it") from error


def _head_over(info: dict[str, Any], shards: Sequence[ShardFile]) -> dict[str, Any]:
    """The head of a manifest as its shards have it; the target's file stays the one that was written."""
    header = shards[0].header
    target = {name: header["target"].get(name) for name in ("fingerprint", "dtype")}
    head = {name: value for name, value in head_of(info).items() if name not in SAME}
    head |= {name: header[name] for name in SAME if name in header}
    head |= {"plan": header["plan"], "target": {**info["target"], **target}}
    if info.get("assembled"):
        head["plan"] = joined_plan(shards)
    if info.get("target_checksum") is not None:
        head["target_checksum"] = info["target_checksum"]
    return head


def _unlisted(folder: Path, known: Expected) -> Expected:
    """Return the whole shards that lie in `folder` beside those listed: a killed prune leaves them."""
    found: Expected = {}
    for name in sorted(os.listdir(folder)):
        if shard_number(name) is not None and name not in known and (folder / name).is_file():
            with suppress(UserError):
                found[name] = (open_shard(folder / name).header["plan"], None)
                continue
            found[name] = ("", None)
    return found


def _shards_with(folder: Path, names: Sequence[str], rows: set[str]) -> set[str]:
    found = set()
    for name in names if rows else ():
        inside = rows & set(open_shard(folder / name).header["row_ids"])
        found |= {name} if inside else set()
        rows -= inside
    if rows:
        raise UserError(f"--row {min(rows)}: no shard of {folder} holds it; see eagle inspect for row ids")
    return found
