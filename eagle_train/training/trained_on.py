"""Which target's weights and which rows a head was trained on, as its run or its export recorded it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from eagle_train.io.text import read_json
from eagle_train.recipe_files import load_recipe
from eagle_train.shards.row_source import RowSource
from eagle_train.training.checkpoints import FOLDER, head_folder
from eagle_train.training.held_out import rank, split
from eagle_train.training.run_folder import RECIPE, RECORD, fingerprint, plans

PROVENANCE = "provenance.json"  # of an export


def trained_on(head: str | Path) -> dict[str, Any] | None:
    """Return name and fingerprint of the target behind a run or a head directory, None where not recorded."""
    folder = head_folder(head).resolve()
    places = [folder / PROVENANCE]
    if folder.parent.name == FOLDER:
        places.append(folder.parent.parent / RECORD)
    for place in places:
        if place.is_file():
            target = read_json(place, "choose another head").get("target")
            if isinstance(target, dict) and target.get("fingerprint"):
                return target
    return None


def other_weights(head: str | Path, target: Mapping[str, Any]) -> str | None:
    """Return a sentence when `head` was trained on weights other than those of `target`, else None."""
    known = trained_on(head)
    if known is None or known["fingerprint"] == target["fingerprint"]:
        return None
    return (
        f"{head}: trained on {known.get('name')} ({known['fingerprint']}), not on the weights of "
        f"{target['name']} ({target['fingerprint']})"
    )


def rows_not_trained_on(run: Path | None, rows: RowSource) -> tuple[list[int], str]:
    """Return the rows to judge the head of `run` by, and in words which they are; None is a head of no run.

    Where the run read the same prepared rows, in whatever form, they are those of conversations that it held
    out, if any is among them; else all rows. Only records are read.
    """
    everything = list(range(len(rows.lengths)))
    if run is None or not all((run / name).is_file() for name in (RECORD, RECIPE)):
        return everything, "all; no record tells which of them the head was trained on"
    record = read_json(run / RECORD, "choose another run")
    if not _shared(record, rows):
        return everything, "all; of other data than the run's, whether it was trained on some cannot be told"
    conversations = rows.conversation_ids
    if (last := record.get("held_out_to")) is not None:
        held_out = [row for row in everything if rank(conversations[row]) <= last]
    elif _as_many(record, rows):  # a split of the same conversations is the same
        held_out = split(conversations, load_recipe(run / RECIPE).data.held_out)[1]
    else:
        return everything, "all, also those trained on; the run does not tell which it held out"
    if held_out:
        return held_out, "held out from training"
    return everything, f"all, {'' if _as_many(record, rows) else 'perhaps '}also those trained on"


def _shared(record: Mapping[str, Any], rows: RowSource) -> bool:
    """True where the run read some of these rows for certain: the same preparation or the same shards."""
    prepared = rows.info.get("rows_fingerprint")
    if prepared is not None and prepared == record.get("rows_fingerprint"):
        return True
    return not plans(rows).isdisjoint([str(record.get("shards")).split("-")[0], *record.get("plans", [])])


def _as_many(record: Mapping[str, Any], rows: RowSource) -> bool:
    """True where rows of which the run read some are those that it read, no more and no fewer."""
    parts = [record.get(name) for name in ("train_rows", "held_out_rows", "rows_without_labels")]
    counts = [part for part in parts if isinstance(part, int)]
    return record.get("shards") == fingerprint(rows) or (
        len(counts) == 3 and sum(counts) == len(rows.lengths)
    )
