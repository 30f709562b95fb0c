"""What the headers of a checkpoint's safetensors files say of its tensors, before any is read."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from eagle_train import hub
from eagle_train.errors import UserError

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

_INDEX, _SINGLE = "model.safetensors.index.json", "model.safetensors"
# last parts of the names by which quantisers store scales and packed weights; a logit_scale is none
_OF_PACKED = re.compile(
    r"([._](weight|input|proj)_scales?(_inv|_2)?|[._](scales|qweight|qzeros|weight_packed))$"
)


class Stored(NamedTuple):
    """A tensor as its file's header describes it."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    size: int  # bytes


def stored_tensors(target: str, config: PretrainedConfig) -> list[Stored]:
    """Return the checkpoint's tensors, in a folder, the hub's cache or on the hub; none in another form."""
    found = _local(target, config)
    return found if found or Path(target).is_dir() else list(_remote(target, config))


def refuse_packed(
    target: str, config: PretrainedConfig, model: PreTrainedModel, unexpected: Iterable[str]
) -> None:
    """Raise UserError where weights are packed though `config` says of no quantisation.

    Loading takes packed weights for plain ones, and leaves their scales out. `unexpected` are the stored
    tensors for which `model` has no place.
    """
    floating = {name: p.is_floating_point() for name, p in model.named_parameters(remove_duplicate=False)}
    for tensor in _local(target, config):
        if tensor.dtype[0] in "IU" and floating.get(tensor.name, tensor.name.endswith(".weight")):
            raise _packed(target, f"{tensor.name} holds {tensor.dtype}")
    if scales := sorted(name for name in unexpected if _OF_PACKED.search(name)):
        raise _packed(target, f"{scales[0]} belongs to a packed weight")


def _packed(target: str, what: str) -> UserError:
    return UserError(
        f"{target}: {what}, but config.json has no quantization_config; put back the one that it was "
        "quantised with, or use the checkpoint that is not quantised"
    )


def _local(target: str, config: PretrainedConfig) -> list[Stored]:
    folder = Path(target) if Path(target).is_dir() else _cached(target, config)
    return [tensor for file in (_files(folder) if folder is not None else []) for tensor in _header(file)]


def _cached(target: str, config: PretrainedConfig) -> Path | None:
    from huggingface_hub import try_to_load_from_cache

    found = try_to_load_from_cache(target, "config.json", revision=_revision(config))
    return Path(found).parent if isinstance(found, str) else None


def _revision(config: PretrainedConfig) -> Any:
    return getattr(config, "_commit_hash", None)


def _files(folder: Path) -> list[Path]:
    """Return the safetensors files of a checkpoint in `folder`; none where one of them is not there."""
    names = {_SINGLE}
    if (folder / _INDEX).is_file():
        names = set(json.loads((folder / _INDEX).read_text())["weight_map"].values())
    files = sorted(folder / name for name in names)
    return files if all(file.is_file() for file in files) else []


def _header(file: Path) -> Iterator[Stored]:
    with open(file, "rb") as handle:
        length = int.from_bytes(handle.read(8), "little")
        record = json.loads(handle.read(min(length, file.stat().st_size)))
    for name, entry in record.items():
        if name != "__metadata__":
            first, end = entry["data_offsets"]
            yield Stored(name, entry["dtype"], tuple(entry["shape"]), end - first)


def _remote(target: str, config: PretrainedConfig) -> Iterator[Stored]:
    from huggingface_hub import get_safetensors_metadata
    from huggingface_hub.errors import NotASafetensorsRepoError, SafetensorsParsingError

    with hub.asked_once(target):
        try:
            found = get_safetensors_metadata(target, revision=_revision(config))
        except (OSError, ValueError, NotASafetensorsRepoError, SafetensorsParsingError):
            return
    for file in found.files_metadata.values():
        for name, entry in file.tensors.items():
            first, end = entry.data_offsets
            yield Stored(name, str(entry.dtype), tuple(entry.shape), end - first)
