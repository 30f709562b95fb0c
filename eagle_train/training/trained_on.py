"""Which target's weights a head was trained on, as its run or its export recorded it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from eagle_train.io import read_json
from eagle_train.training.checkpoints import FOLDER, head_folder
from eagle_train.training.run_folder import RECORD

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
