"""What is wrong in a shard directory: with single shards, and with the manifest over whole ones."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from eagle_train.distributed import num_cores
from eagle_train.errors import UserError
from eagle_train.io.tensors import load_tensors
from eagle_train.progress import progress
from eagle_train.shards.files import ShardFile, mend_shard, open_shard
from eagle_train.shards.manifest import counted, index_of, joined_plan
from eagle_train.shards.reader import mend_listing, refuse_other_head
from eagle_train.shards.schema import INDEX, MANIFEST, PLAN, Plan, shard_name

Expected = dict[str, tuple[str, int | None]]  # by file name: the plan it must be of, its size if known


def told(check: Callable[[], object]) -> list[str]:
    """Return what `check` complains of: nothing, or the one line of its UserError."""
    try:
        check()
    except UserError as error:
        return [str(error)]
    return []


def listing_faults(folder: Path, info: dict[str, Any], shards: Sequence[ShardFile]) -> list[str]:
    """Return what the manifest says otherwise than the shards, all of them whole."""
    for shard in shards:
        if said := told(lambda shard=shard: refuse_other_head(folder, info, shard)):  # type: ignore[misc]
            return said
    own = counted(shards)
    own["shards"] = [
        {name: entry[name] for name in had if name in entry}
        for entry, had in zip(own["shards"], info["shards"], strict=True)
    ]
    if shards:
        own["plan"] = joined_plan(shards) if info.get("assembled") else shards[0].header["plan"]
    return [
        f"{folder / MANIFEST}: {name}: not what the shards hold; {mend_listing(folder)}"
        for name, value in own.items()
        if info[name] != value
    ]


def index_faults(folder: Path, shards: Sequence[ShardFile]) -> list[str]:
    """Return in which tensors an index that can be read differs from one made of the shards, all whole."""
    had, own = load_tensors(folder / INDEX)[0], index_of(shards)
    return [
        f"{folder / INDEX}: {name}: not what the shards hold; {mend_listing(folder)}"
        for name in sorted(had.keys() | own.keys())
        if name not in had or name not in own or not torch.equal(had[name], own[name])
    ]


def listed(info: dict[str, Any]) -> Expected:
    """Return the shards that a manifest lists."""
    return {entry["file"]: (entry.get("plan", info["plan"]), entry["bytes"]) for entry in info["shards"]}


def planned(folder: Path) -> Expected:
    """Return the shards of an unfinished extraction's plan that are there, of whatever size."""
    plan = Plan.load(folder)
    there = [shard_name(number) for number in range(len(plan.shards))]
    return {name: (plan.identity, None) for name in there if (folder / name).is_file()}


def removed_rows(folder: Path, info: dict[str, Any] | None) -> int:
    """Return how many rows of a finished extraction were removed again with their shards (`prune`).

    0 where no plan, or a damaged one, can tell.
    """
    if info is None or info.get("assembled") or not (folder / PLAN).is_file():
        return 0
    try:
        plan = Plan.load(folder)
    except UserError:
        return 0
    left = {entry["file"] for entry in info["shards"]}
    return sum(len(shard.rows) for n, shard in enumerate(plan.shards) if shard_name(n) not in left)


def shard_faults(folder: Path, expected: Expected, show: bool) -> dict[str, str]:
    """Read every byte of the shards; return, by file name, what is wrong."""
    faults = {}
    with (
        progress("shards verify", len(expected), "shards", show) as bar,
        ThreadPoolExecutor(num_cores()) as readers,
    ):
        found = readers.map(lambda one: _fault(folder, *one), expected.items())
        for name, fault in zip(expected, found, strict=True):
            bar.advance()
            if fault:
                faults[name] = fault
    return faults


def _fault(folder: Path, name: str, wanted: tuple[str, int | None]) -> str | None:
    plan, size = wanted
    try:
        shard = open_shard(folder / name)
        if shard.header["plan"] != plan or size not in (None, shard.size):
            return f"{shard.path}: not the shard that the directory lists; {mend_shard(shard.path)}"
        shard.verify()
    except UserError as error:
        return str(error)
    return None
