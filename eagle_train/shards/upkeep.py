"""Care of shard directories: verify, describe, merge, split, prune. No target and no rows are needed."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from eagle_train.distributed import num_cores
from eagle_train.errors import UserError
from eagle_train.io import make_folder, os_error, replacing, sha256_json
from eagle_train.progress import progress
from eagle_train.shards import frozen_target
from eagle_train.shards.files import ShardFile, open_shard
from eagle_train.shards.manifest import read_manifest, write_manifest
from eagle_train.shards.reader import load_frozen, open_shards
from eagle_train.shards.schema import INDEX, MANIFEST, PLAN, Plan, shard_name

# What shards must share to lie in one directory, and how a command line says it.
_SAME = {
    "features": "--for",
    "layer_ids": "layers",
    "codec": "codec",
    "hidden_size": "hidden size",
    "vocab_size": "vocabulary",
    "num_layers": "number of layers",
    "tokenizer_fingerprint": "tokenizer",
}


def describe(folder: str | Path) -> dict[str, Any]:
    """Return what a shard directory holds, finished or not; raise UserError where it is none."""
    folder = Path(folder)
    complete = (folder / MANIFEST).is_file()
    if complete or not (folder / PLAN).is_file():
        info = read_manifest(folder)
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
        "complete": complete,
        **{name: setting[name] for name in ("target", "features", "layer_ids", "codec", "hidden_size")},
        "rows": rows,
        "skipped": len(setting.get("skipped", [])),
        "tokens": tokens,
        "labels": labels,
        "shards": len(files),
        "shards_there": len(there),
        "bytes": size,
        "bytes_per_token": size / tokens if complete and tokens else None,
    }


def verify(folder: str | Path, show: bool = True) -> dict[str, Any]:
    """Read every byte of a shard directory; return counts and ``faults``, one line for each bad file.

    Raises UserError where `folder` is no shard directory.
    """
    folder = Path(folder)
    found = describe(folder)
    expected = _expected(folder)
    with (
        progress("verify", len(expected), "shards", show) as bar,
        ThreadPoolExecutor(num_cores()) as readers,
    ):
        faults = []
        for fault in readers.map(lambda one: _fault(folder, *one), expected.items()):
            bar.advance()
            faults += [fault] if fault else []
    if found["complete"]:
        info = read_manifest(folder)
        for check in (
            lambda: load_frozen(folder, info["target"].get("fingerprint"), info.get("target_checksum")),
            lambda: open_shards(folder),
        ):
            try:
                check()
            except UserError as error:
                faults.append(str(error))
    return {**found, "faults": faults}


def _expected(folder: Path) -> dict[str, tuple[str, int | None]]:
    """Return, by file name, the plan that each shard must be of and its size where that is known."""
    if (folder / MANIFEST).is_file():
        info = read_manifest(folder)
        return {entry["file"]: (entry.get("plan", info["plan"]), entry["bytes"]) for entry in info["shards"]}
    plan = Plan.load(folder)
    there = [shard_name(number) for number in range(len(plan.shards))]
    return {name: (plan.identity, None) for name in there if (folder / name).is_file()}


def _fault(folder: Path, name: str, wanted: tuple[str, int | None]) -> str | None:
    plan, size = wanted
    try:
        shard = open_shard(folder / name)
        if shard.header.get("plan") != plan or size not in (None, shard.size):
            return f"{shard.path}: not the shard that the directory lists; run the same eagle extract again"
        shard.verify()
    except UserError as error:
        return str(error)
    return None


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
    if not 2 <= parts <= len(info["shards"]):
        raise UserError(
            f"--parts {parts}: {folder} holds {len(info['shards'])} shards; wanted 2 to {len(info['shards'])}"
        )
    shards = _whole_shards(place, show)
    return [
        _assemble(Path(out) / f"part-{number}", place, info, shards[number::parts]) for number in range(parts)
    ]


def prune(
    folder: str | Path,
    *,
    shards: Iterable[int] = (),
    rows: Iterable[str] = (),
    damaged: bool = False,
    show: bool = True,
) -> dict[str, Any]:
    """Remove shards by the number in their name, by the ids of rows in them, or those that are damaged.

    The directory then holds the others, and the same extraction makes the removed ones anew. Returns what
    it holds, with ``removed``. Raises UserError for a number or a row that is not there.
    """
    place = Path(folder)
    names = list(_expected(place))
    removed = set()
    for number in shards:
        if shard_name(number) not in names:
            raise UserError(f"--shard {number}: {place} holds no {shard_name(number)}")
        removed.add(shard_name(number))
    removed |= _shards_with(place, names, set(rows))
    if damaged:
        expected = _expected(place)
        removed |= {name for name, wanted in expected.items() if _fault(place, name, wanted)}
    kept = [name for name in names if name not in removed]
    if removed:
        info = read_manifest(place) if (place / MANIFEST).is_file() else None
        for name in (MANIFEST, INDEX, *sorted(removed)):
            (place / name).unlink(missing_ok=True)
        if info is not None and kept:
            write_manifest(place, _head(info), [open_shard(place / name) for name in kept])
    return {
        "folder": str(place),
        "removed": sorted(removed),
        "shards": len(kept),
        "extract_again": (place / PLAN).is_file(),
    }


def _shards_with(folder: Path, names: Sequence[str], rows: set[str]) -> set[str]:
    found = set()
    for name in names if rows else ():
        inside = rows & set(open_shard(folder / name).header["row_ids"])
        found |= {name} if inside else set()
        rows -= inside
    if rows:
        raise UserError(f"--row {min(rows)}: no shard of {folder} holds it; see eagle inspect for row ids")
    return found


def _refuse_other(first: Path, known: dict[str, Any], second: Path, other: dict[str, Any]) -> None:
    pairs = [(words, known.get(name), other.get(name)) for name, words in _SAME.items()]
    for name in ("fingerprint", "dtype"):
        pairs.append((f"target {name}", known["target"].get(name), other["target"].get(name)))
    for words, have, found in pairs:
        if have != found:
            raise UserError(
                f"{second}: {words} {found}, {first} has {have}; only shards made alike can be merged: "
                "extract one of them again"
            )


def _whole_shards(folder: Path, show: bool) -> list[ShardFile]:
    if faults := verify(folder, show)["faults"]:
        raise UserError(faults[0])
    return [open_shard(folder / name) for name in _expected(folder)]


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
    plan = sha256_json([shard.header["checksums"] for shard in shards])[:16]
    head = {**_head(info), "plan": plan, "assembled": True}  # no extraction goes on in it
    write_manifest(out, head, [open_shard(out / shard_name(number)) for number in range(len(shards))])
    return describe(out)


def _head(info: dict[str, Any]) -> dict[str, Any]:
    """What a manifest says of how its shards were made."""
    counted = {
        "format_version",
        "num_rows",
        "tokens",
        "labels",
        "skipped",
        "shards",
        "supervised_frequencies",
    }
    return {name: value for name, value in info.items() if name not in counted | {"target_checksum"}}


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
