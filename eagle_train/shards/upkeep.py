"""Care of shard directories: verify, describe, merge, split. No target and no rows are needed."""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from eagle_train.errors import UserError
from eagle_train.io.checksums import sha256_json
from eagle_train.io.paths import make_folder, os_error
from eagle_train.io.whole_file import replacing
from eagle_train.progress import counted
from eagle_train.shards import frozen_target
from eagle_train.shards.checking import (
    index_faults,
    listed,
    listing_faults,
    planned,
    removed_rows,
    shard_faults,
    told,
)
from eagle_train.shards.files import ShardFile, open_shard
from eagle_train.shards.frozen_target import load_frozen
from eagle_train.shards.listing import find_manifest, read_manifest
from eagle_train.shards.manifest import SAME, head_of, in_common, joined_plan, write_manifest
from eagle_train.shards.reader import open_shards
from eagle_train.shards.schema import INDEX, PLAN, Plan, mend, shard_name


def describe(folder: str | Path) -> dict[str, Any]:
    """Return what a shard directory holds, finished or not; raise UserError where it is none."""
    return _described(Path(folder), find_manifest(Path(folder)))


def _described(folder: Path, info: dict[str, Any] | None) -> dict[str, Any]:
    """Describe by the manifest, or by the plan where there is none."""
    if info is not None:
        files = [folder / entry["file"] for entry in info["shards"]]
        rows, tokens, labels = info["num_rows"], info["tokens"], info["labels"]
        setting = info
    else:
        plan = Plan.load(folder)
        files = [folder / shard_name(number) for number in range(len(plan.shards))]
        rows, tokens, labels = plan.num_rows, plan.tokens, plan.labels
        setting = plan.to_json()["setting"]
    there = [file for file in files if file.is_file()]
    size = sum(file.stat().st_size for file in there)
    return {
        "folder": str(folder),
        "complete": info is not None,
        **{name: setting[name] for name in ("target", "features", "layer_ids", "codec", "hidden_size")},
        "label_top_k": setting.get("label_top_k") or None,
        "label_mass": setting.get("label_mass"),
        "rows": rows,
        "skipped": len(setting.get("skipped", [])),
        "tokens": tokens,
        "labels": labels,
        "removed": removed_rows(folder, info),
        "shards": len(files),
        "shards_there": len(there),
        "bytes": size,
        "target_bytes": frozen_target.target_bytes(folder),
        "bytes_per_token": size / tokens if info is not None and tokens else None,
    }


def verify(folder: str | Path, show: bool = True) -> dict[str, Any]:
    """Read every byte of a shard directory; return counts and ``faults``, one line for each bad file.

    ``advice`` says what mends them. Raises UserError where `folder` is no shard directory.
    """
    folder = Path(folder)
    listing: list[str] = []
    try:
        info = find_manifest(folder)
    except UserError as error:
        if not (folder / PLAN).is_file():
            raise
        info, listing = None, [str(error)]
    found = _described(folder, info)
    expected = listed(info) if info else planned(folder)
    faults = list(shard_faults(folder, expected, show).values())
    target: list[str] = []
    if info is not None:
        fingerprint, checksum = info["target"]["fingerprint"], info.get("target_checksum")
        target = told(lambda: load_frozen(folder, fingerprint, checksum))
        unread = told(lambda: open_shards(folder))
        listing = unread + _plan_faults(folder, info)
        if not faults:
            shards = [open_shard(folder / name) for name in expected]
            listing += listing_faults(folder, info, shards)
            listing += [] if unread or not shards else index_faults(folder, shards)
    found["faults"] = [*faults, *target, *listing]
    return {**found, "advice": _advice(folder, bool(faults), bool(target))}


def _plan_faults(folder: Path, info: dict[str, Any]) -> list[str]:
    """Return what is wrong with the plan of an extraction that is finished; none goes on with another."""
    if not (folder / PLAN).is_file() or info.get("assembled"):
        return []
    try:
        plan = Plan.load(folder)
    except UserError as error:
        return [str(error)]
    if all(plan.identity == made_by for made_by, _ in listed(info).values()):
        return []
    return [f"{folder / PLAN}: edited: not the plan of these shards; extract again into another --out"]


def _advice(folder: Path, shards: bool, target: bool) -> str:
    extracted, prune = (folder / PLAN).is_file(), f"eagle shards prune {folder} --damaged"
    if not extracted and not target:
        return f"{prune} leaves damaged shards out and writes index and manifest anew"
    return mend(folder) + (f", or go on without the damaged shards: {prune}" if shards and extracted else "")


def merge(folders: Sequence[str | Path], out: str | Path, show: bool = True) -> dict[str, Any]:
    """Put the shards of several directories into one, unchanged; return what it then holds.

    Rows come directory by directory, those of one extraction in its own order. Files are linked where the
    file system can, else copied. Raises UserError for a damaged shard, a row that is in two of them, or
    directories of another target, other layers or another codec.
    """
    places = [Path(folder) for folder in folders]
    if len(places) < 2:
        raise UserError(f"merge: got {len(places)} directory, wanted two or more")
    infos = [read_manifest(place) for place in places]
    for place, info in zip(places[1:], infos[1:], strict=True):
        _refuse_other(places[0], infos[0], place, info)
    shards = [shard for place in places for shard in _whole_shards(place, show)]
    _refuse_doubles(shards)
    plans = list(dict.fromkeys(shard.header["plan"] for shard in shards))
    shards.sort(key=lambda shard: (plans.index(shard.header["plan"]), shard.header["shard"]))
    rows = list(dict.fromkeys(info.get("rows_fingerprint") for info in infos))
    joined = rows[0] if len(rows) == 1 else sha256_json(rows)[:16]
    return _assemble(Path(out), places[0], {**infos[0], "rows_fingerprint": joined}, shards)


def split(folder: str | Path, out: str | Path, parts: int, show: bool = True) -> list[dict[str, Any]]:
    """Deal the shards of a directory, unchanged, to `parts` directories ``out/part-0`` and so on.

    Returns what each holds. Raises UserError for a damaged shard or more parts than shards.
    """
    place, info = Path(folder), read_manifest(Path(folder))
    if len(info["shards"]) < 2:
        raise UserError(
            f"{folder}: holds {counted(len(info['shards']), 'shard')}, which cannot be split; extract with "
            "a smaller --batch-tokens into another --out: a shard is whole batches"
        )
    if not 2 <= parts <= len(info["shards"]):
        raise UserError(
            f"--parts {parts}: {folder} holds {len(info['shards'])} shards; wanted 2 to {len(info['shards'])}"
        )
    shards = _whole_shards(place, show)
    return [
        _assemble(Path(out) / f"part-{number}", place, info, shards[number::parts]) for number in range(parts)
    ]


def _refuse_other(first: Path, known: dict[str, Any], second: Path, other: dict[str, Any]) -> None:
    ours, theirs = in_common(known), in_common(other)
    for name, have in ours.items():
        if have != theirs[name]:
            raise UserError(
                f"{second}: {SAME.get(name, name)} {theirs[name]}, {first} has {have}; "
                "only shards made alike can be merged: extract one of them again"
            )


def _whole_shards(folder: Path, show: bool) -> list[ShardFile]:
    if faults := verify(folder, show)["faults"]:
        raise UserError(faults[0])
    return [open_shard(folder / name) for name in listed(read_manifest(folder))]


def _refuse_doubles(shards: Sequence[ShardFile]) -> None:
    seen: dict[str, Path] = {}
    for shard in shards:
        for row in shard.header["row_ids"]:
            if row in seen:
                raise UserError(
                    f"{shard.path}: row {row} is in {seen[row]} too; every row may be there once: leave one "
                    "of the two directories out, or prepare them without the doubles"
                )
            seen[row] = shard.path


def _assemble(out: Path, source: Path, info: dict[str, Any], shards: Sequence[ShardFile]) -> dict[str, Any]:
    """Link `shards` and the frozen target of `source` into the new directory `out`; manifest last."""
    own = {INDEX, frozen_target.TENSORS, frozen_target.RECORD}
    if out.is_dir() and (
        foreign := [n for n in os.listdir(out) if n not in own and not n.startswith(("shard-", "."))]
    ):
        raise UserError(f"{out}: holds {min(foreign)} already; choose a new or empty --out")
    make_folder(out)
    for name in (frozen_target.TENSORS, frozen_target.RECORD):
        _link(source / name, out / name)
    for number, shard in enumerate(shards):
        _link(shard.path, out / shard_name(number))
    head = {**head_of(info), "plan": joined_plan(shards), "assembled": True}  # no extraction goes on in it
    write_manifest(out, head, [open_shard(out / shard_name(number)) for number in range(len(shards))])
    return describe(out)


def _link(source: Path, final: Path) -> None:
    """Give a file a second name, which costs no room, or copy it. Shards are never changed in place."""
    final.unlink(missing_ok=True)
    try:
        os.link(source, final)
    except OSError:  # another file system, or one without links
        try:
            with replacing(final) as temporary:
                shutil.copyfile(source, temporary)
        except OSError as error:
            raise os_error(final, error) from error
