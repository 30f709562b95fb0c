"""A head as a directory: config.json + model.safetensors under the names that engines load."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from eagle_train.errors import UserError
from eagle_train.heads.config import HeadConfig
from eagle_train.heads.config_fields import check_one_rope, checked
from eagle_train.heads.draft_vocab import from_offsets, to_offsets
from eagle_train.heads.eagle1 import Eagle1Head
from eagle_train.heads.eagle3 import Eagle3Head
from eagle_train.heads.medusa import MedusaHead
from eagle_train.io.paths import make_folder
from eagle_train.io.tensors import load_tensors, save_tensors
from eagle_train.io.text import read_json, write_json

EagleHead = Eagle1Head | Eagle3Head
Head = EagleHead | MedusaHead
CONFIG, WEIGHTS = "config.json", "model.safetensors"


def build_head(config: HeadConfig, draft_ids: Tensor | None = None) -> Head:
    """Return a head with torch's default random weights; `draft_ids` [D] for a reduced vocabulary."""
    if config.kind == "medusa":
        return MedusaHead(config, draft_ids)
    return Eagle1Head(config) if config.kind == "eagle1" else Eagle3Head(config, draft_ids)


def head_tensors(head: Head, dtype: torch.dtype | None = None) -> dict[str, Tensor]:
    """Return the head's tensors under their names on disk, floats in `dtype` where given.

    A reduced vocabulary adds d2t and t2d; an unreduced one has neither (vLLM refuses them then). The input
    norm of EAGLE-3's further layers has two names, for vLLM reads input_layernorm and SGLang hidden_norm.
    """
    tensors = {name: value.detach() for name, value in head.named_parameters()}
    if dtype is not None:
        tensors = {name: value.to(dtype) for name, value in tensors.items()}
    tensors |= {twin: tensors[name].clone() for twin, name in norm_twins(head.config).items()}
    if head.config.reduced_vocabulary:
        tensors |= {"d2t": to_offsets(head.draft_ids), "t2d": head.in_draft}
    return tensors


def norm_twins(config: HeadConfig) -> dict[str, str]:
    """Return the second name on disk of each layer's input norm, by which SGLang reads it, with the first."""
    numbers = range(1, config.num_hidden_layers if config.kind == "eagle3" else 1)
    return {f"layers.{i}.hidden_norm.weight": f"layers.{i}.input_layernorm.weight" for i in numbers}


def save_head(head: Head, folder: str | os.PathLike[str], dtype: torch.dtype | None = None) -> HeadConfig:
    """Write the head to `folder`, config last; return the config written, whose dtype is that of the file."""
    stored = dtype or next(head.parameters()).dtype
    config = replace(head.config, dtype=str(stored).removeprefix("torch."))
    path = make_folder(folder)
    save_tensors(path / WEIGHTS, head_tensors(head, dtype), {"format": "pt"})
    write_json(path / CONFIG, config.to_json())
    return config


def load_config(folder: str | os.PathLike[str]) -> HeadConfig:
    """Read a head directory's config.json alone. Raises UserError."""
    path = Path(folder) / CONFIG
    value = checked(read_json(path, "give a head directory written by eagle train or export"), str(path))
    check_one_rope(value, str(path), "correct one of them")
    return HeadConfig.from_json(value, str(path))


def load_head(folder: str | os.PathLike[str]) -> Head:
    """Read a head as it was stored (its dtype too).

    Strict: UserError names every tensor that is missing, unexpected or misshapen, or holds NaN or
    infinity, because engines load such files without a word and serve at an acceptance length of 1.
    """
    path = Path(folder) / WEIGHTS
    return head_of_tensors(load_config(folder), load_tensors(path)[0], str(path))


def head_of_tensors(config: HeadConfig, stored: dict[str, Tensor], where: str) -> Head:
    """Return the head that `stored` holds under the names on disk, d2t and t2d included; strict as above."""
    draft_ids = _draft_ids(stored, config, where)
    _drop_twins(stored, config, where)
    with torch.device("meta"):
        head = build_head(config, draft_ids if draft_ids is None else draft_ids.to("meta"))
    _check(stored, dict(head.named_parameters()), where)
    check_finite(stored, where)
    head = build_head(config, draft_ids)
    head.to(next(iter(stored.values())).dtype if stored else None)
    head.load_state_dict(stored, strict=False)
    return head


def check_finite(tensors: Mapping[str, Tensor], where: str) -> None:
    """Raise UserError naming the first tensor that holds NaN or an infinity."""
    for name, value in tensors.items():
        if not bool(value.isfinite().all()):
            raise UserError(f"{where}: {name} holds NaN or infinity; no head computes with such a weight")


def _drop_twins(stored: dict[str, Tensor], config: HeadConfig, where: str) -> None:
    """Take the second names of input norms out of `stored`, which must hold the same values."""
    for twin, name in norm_twins(config).items():
        if name not in stored or twin not in stored:
            lost = name if name not in stored else twin
            raise UserError(f"{where}: not this head's weights: missing {lost}")
        check_finite({key: stored[key] for key in (twin, name)}, where)  # NaN equals nothing, not even itself
        if not stored.pop(twin).equal(stored[name]):
            raise UserError(
                f"{where}: {twin}, which SGLang reads, is not {name}, which vLLM reads in its place; keep "
                "the one that the head was trained with"
            )


def _draft_ids(stored: dict[str, Tensor], config: HeadConfig, where: str) -> Tensor | None:
    """Take the vocabulary maps out of `stored`."""
    if not config.reduced_vocabulary:
        return None
    if "d2t" not in stored or stored["d2t"].shape != (config.draft_vocab_size,):
        raise UserError(
            f"{where}: wanted d2t with {config.draft_vocab_size} entries, found {_shape(stored.get('d2t'))}"
        )
    t2d = stored.pop("t2d", None)
    if t2d is None or t2d.shape != (config.vocab_size,):
        raise UserError(f"{where}: wanted t2d with {config.vocab_size} entries, found {_shape(t2d)}")
    return from_offsets(stored.pop("d2t"), t2d, config.vocab_size, where)


def _check(stored: dict[str, Tensor], wanted: dict[str, torch.nn.Parameter], where: str) -> None:
    faults = [f"missing {name}" for name in wanted if name not in stored]
    faults += [f"unexpected {name}" for name in stored if name not in wanted]
    faults += [
        f"{name} is {_shape(stored[name])}, wanted {_shape(value)}"
        for name, value in wanted.items()
        if name in stored and stored[name].shape != value.shape
    ]
    if faults:
        raise UserError(f"{where}: not this head's weights: {'; '.join(faults)}")


def _shape(tensor: Tensor | None) -> str:
    return "nothing" if tensor is None else str(list(tensor.shape))
