"""A head that another toolkit trained, or that was exported here, written as a head directory of ours."""

from __future__ import annotations

import os
import reprlib
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import Tensor

from eagle_train.errors import UserError
from eagle_train.evaluation.heads import find_head, run_of
from eagle_train.export.folder import check_free, folder_bytes
from eagle_train.export.layout import SWITCHES
from eagle_train.export.source import find_target_config, text_config
from eagle_train.heads.disk import CONFIG, WEIGHTS, Head, load_head, save_head
from eagle_train.heads.foreign import ForeignHead, is_foreign, read_foreign
from eagle_train.heads.foreign_config import Told
from eagle_train.io.checksums import sha256_file
from eagle_train.io.text import write_json
from eagle_train.io.whole_folder import replacing_folder
from eagle_train.progress import bytes_text
from eagle_train.provenance import tool_version
from eagle_train.training.trained_on import PROVENANCE, trained_on

_MADE_BY = "eagle import"
_FILES = {CONFIG, WEIGHTS, PROVENANCE}


def import_head(
    source: str | Path,
    out: str | Path,
    *,
    target: str | None = None,
    told: Told | None = None,
    overwrite: bool = False,
) -> dict[str, Any]:
    """Read a head in the layout of EAGLE's repository, SpecForge, speculators or ModelOpt, or an export of
    ours for any engine; write it to `out`.

    `source` is a directory or a hub id. `target` names its target: its config.json, where at hand, says how
    deep it is, and the name is recorded. `told` answers what the files leave open. Nothing appears at `out`
    unless the head read back computes the same. Returns what was read, ``notes`` being what was taken for
    granted. Raises UserError for whatever a head here cannot compute, and for what stays open.
    """
    folder = find_head(source)
    if run_of(folder.resolve()) is not None:
        raise UserError(
            f"{source}: a run of eagle train, whose head needs no import; use it as it is, or eagle export it"
        )
    final = Path(os.path.abspath(out))
    check_free(final, _MADE_BY, _FILES, [folder.resolve()], overwrite)
    depth = _depth(target or "")
    read = _read(folder, told or Told(), depth)
    config = replace(read.head.config, target=target or read.head.config.target)
    if depth is not None:
        config = replace(config, feature_layers=config.layers_for(depth))
    read.head.config = config
    name = Path(source).name if Path(source).exists() else str(source)
    record = {
        "format_version": 1,
        "made_by": _MADE_BY,
        "tool_version": tool_version(),
        "source": name,
        "layout": read.layout,
        "target": trained_on(folder),
        "notes": list(read.notes),
    }
    with replacing_folder(final) as fresh:
        save_head(read.head, fresh)
        _check_equal(read.head, load_head(fresh), fresh)
        write_json(fresh / PROVENANCE, {**record, "weights_sha256": sha256_file(fresh / WEIGHTS)})
    return {
        "out": str(out),
        "kind": config.kind,
        "size": bytes_text(folder_bytes(final)),
        "target": config.target,
        "feature_layers": list(config.feature_layers),
        "rope": config.rope_parameters,
        "draft_vocab_size": config.draft_vocab_size,
        "vocab_size": config.vocab_size,
        "dtype": config.dtype,
        "switches": switches(read),
        **{key: record[key] for key in ("source", "layout", "notes")},
    }


def _read(folder: Path, told: Told, depth: int | None) -> ForeignHead:
    """Return the head in `folder`. A config.json of our own leaves nothing open: it takes no answers."""
    if is_foreign(folder):
        return read_foreign(folder, told, depth)
    if given := [name for name, value in vars(told).items() if value is not None]:
        option = given[0].replace("_", "-")
        raise UserError(
            f"--{option}: {folder / CONFIG} is eagle's own and leaves nothing open; drop the option"
        )
    return ForeignHead(load_head(folder), "eagle export", (), None, None)


def _depth(target: str) -> int | None:
    """Return how many layers the target has, None where its config.json is not at hand."""
    found = text_config(find_target_config(target)).get("num_hidden_layers")
    if found is not None and (type(found) is not int or found < 1):
        raise UserError(
            f"{target}: num_hidden_layers is {reprlib.repr(found)} in its config.json, wanted 1 or more"
        )
    return found


def switches(read: ForeignHead) -> list[str]:
    """Return the settings of the forward that plain heads do not have, those that are on."""
    config = read.head.config
    found = [name for name in (*SWITCHES, "fc_bias", "attention_bias", "qk_norm") if getattr(config, name)]
    return found + ([f"sliding_window {config.sliding_window}"] if config.sliding_window else [])


def _check_equal(head: Head, again: Head, folder: Path) -> None:
    """Raise UserError unless what was written is what was read, tensor by tensor."""
    before, after = dict(head.named_parameters()), dict(again.named_parameters())
    tables: list[tuple[Tensor, Tensor]] = [(before[name], after[name]) for name in before]
    tables.append((head.draft_ids, again.draft_ids))
    if before.keys() != after.keys() or not all(one.equal(other) for one, other in tables):
        raise UserError(f"{folder}: the head read back is not the one imported")
