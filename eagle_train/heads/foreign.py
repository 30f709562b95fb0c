"""A draft head that another toolkit trained, read into a head of ours that computes the same."""

from __future__ import annotations

import os
import warnings
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from eagle_train.errors import UserError
from eagle_train.heads.config import is_own
from eagle_train.heads.disk import CONFIG, WEIGHTS, Head, head_of_tensors, load_head
from eagle_train.heads.draft_vocab import from_offsets, membership
from eagle_train.heads.foreign_config import Told, resolve
from eagle_train.heads.foreign_tensors import (
    INDEX,
    PICKLED,
    ForeignTensors,
    common_dtype,
    read_tensors,
    to_our_names,
)
from eagle_train.io.text import read_json

FILES = (WEIGHTS, INDEX, PICKLED)  # of which a head directory has one
_SAME = 2.0**-7  # two copies of a table may be rounded to different dtypes


@dataclass
class ForeignHead:
    """What was read, and how."""

    head: Head
    layout: str  # EAGLE, SpecForge, speculators or ModelOpt
    notes: tuple[str, ...]  # what was taken for granted, one sentence each
    embedding: Tensor | None  # [V, H], its own copy of the target's embedding
    lm_head: Tensor | None  # [V, H], an EAGLE-1 head's own copy of the target's lm_head

    def check_copies(self, embedding: Tensor, lm_head: Tensor, where: str) -> None:
        """Raise UserError where the head's copies are not the target's tables, which a head here uses."""
        for name, own, target in (
            ("embed_tokens.weight", self.embedding, embedding),
            ("lm_head.weight", self.lm_head, lm_head),
        ):
            if own is None:
                continue
            if own.shape != target.shape or not _alike(own, target.to(own.device)):
                raise UserError(
                    f"{where}: its {name} is not the target's; a head with tables of its own, or one for "
                    "another target, cannot be run here"
                )


def is_foreign(folder: str | os.PathLike[str]) -> bool:
    """True for a head directory whose config.json another toolkit wrote."""
    path = Path(folder) / CONFIG
    return not is_own(read_json(path, "give a directory that holds a draft head"))


def read_foreign(
    folder: str | os.PathLike[str], told: Told | None = None, num_target_layers: int | None = None
) -> ForeignHead:
    """Read a head in the layout of EAGLE's repository, SpecForge, speculators or ModelOpt.

    `told` answers what the files leave open; `num_target_layers` is n of its target where known. Strict, as
    for heads of ours: UserError names every tensor missing, unexpected or misshapen, every switch that is
    not computed here, and every question left open with the option that answers it.
    """
    told, path = told or Told(), Path(folder)
    config_file = path / CONFIG
    value = read_json(config_file, "give a directory that holds a draft head")
    where = str(path)
    tensors = to_our_names(read_tensors(path), where)
    dtype = common_dtype(tensors.weights, where)
    resolved = resolve(value, tensors, told, num_target_layers, str(config_file))
    config = replace(resolved.config, dtype=str(dtype).removeprefix("torch."))
    weights = {name: tensor.to(dtype) for name, tensor in tensors.weights.items()}
    if config.reduced_vocabulary:
        weights |= _vocabulary_maps(tensors, config.vocab_size, where)
    else:
        _check_idle_maps(tensors, where)
    return ForeignHead(
        head_of_tensors(config, weights, where),
        resolved.layout,
        tuple(resolved.notes),
        tensors.embedding,
        tensors.lm_head,
    )


def read_any(
    folder: str | os.PathLike[str],
    num_target_layers: int | None = None,
    tables: tuple[Tensor, Tensor] | None = None,
) -> Head:
    """Read a head of ours or another's; what was taken for granted of the latter becomes warnings.

    `tables` are the target's embedding and lm_head, where at hand: copies in the file must equal them.
    Raises UserError as `read_foreign` and `load_head` do.
    """
    if not is_foreign(folder):
        return load_head(folder)
    try:
        read = read_foreign(folder, num_target_layers=num_target_layers)
    except UserError as error:
        raise UserError(_with_command(str(error))) from error
    for note in read.notes:
        warnings.warn(f"{folder}: {_with_command(note)}", stacklevel=2)
    if tables is not None:
        read.check_copies(*tables, str(folder))
    return read.head


def _with_command(words: str) -> str:
    """Say whose the options in `words` are: whoever reads a head has others."""
    return f"{words} (an option of eagle import)" if " --" in words and "eagle import" not in words else words


def _vocabulary_maps(tensors: ForeignTensors, vocab_size: int, where: str) -> dict[str, Tensor]:
    """Return d2t and t2d; the latter follows from the former where the file has none."""
    maps = dict(tensors.maps)
    if "d2t" in maps and "t2d" not in maps:
        maps["t2d"] = membership(from_offsets(maps["d2t"], None, vocab_size, where), vocab_size)
    return maps


def _check_idle_maps(tensors: ForeignTensors, where: str) -> None:
    """Refuse maps beside a whole vocabulary that would change an id."""
    d2t = tensors.maps.get("d2t")
    if d2t is not None and bool(d2t.any()):
        raise UserError(f"{where}: d2t moves ids although the head drafts the whole vocabulary")


def _alike(own: Tensor, target: Tensor) -> bool:
    return torch.allclose(own.float(), target.float(), rtol=_SAME, atol=1e-6)
