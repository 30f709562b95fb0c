"""From a survey and loaded weights to the one plan of a folder, whoever comes first."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from eagle_train import distributed
from eagle_train.errors import UserError
from eagle_train.shards.frozen_target import load_frozen
from eagle_train.shards.listing import read_manifest
from eagle_train.shards.schema import MANIFEST, PLAN, Plan
from eagle_train.targets.load import Target
from eagle_train.targets.survey import Survey


def settle(work: Survey, target: Target, folder: Path) -> Plan:
    """Complete the plan by the target's identity and write it, or find the same one there.

    The main worker also writes embedding and output map. Raises UserError when `folder` holds another plan.
    """
    identity = target.identity()
    while True:
        known = Plan.load(folder) if (folder / PLAN).is_file() else None
        if known is not None and known.setting.target["fingerprint"] == identity["fingerprint"]:
            for name in ("name", "revision"):  # those first given stay in the headers
                identity[name] = known.setting.target[name]
        setting = replace(work.plan.setting, target=identity, vocab_size=target.vocab_size)
        plan = replace(work.plan, setting=setting)
        if known is None:
            if plan.create(folder):
                break
            continue  # another run was quicker
        known.setting.refuse_other(setting, folder)
        if known != plan:
            raise UserError(
                f"{folder / PLAN}: edited: not the plan of these rows; delete the folder to start again"
            )
        break
    if distributed.is_main():
        _keep_frozen(target, folder)
    return plan


def _keep_frozen(target: Target, folder: Path) -> None:
    """Write embedding and output map, unless the right ones are there."""
    frozen = target.frozen()
    with suppress(UserError):
        info = read_manifest(folder) if (folder / MANIFEST).is_file() else {}
        load_frozen(folder, frozen.target["fingerprint"], info.get("target_checksum"))
        return
    frozen.save(folder)
