"""How many bytes a target's weights will take in memory, quantised or not, before any is loaded."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from eagle_train import hub
from eagle_train.targets.checkpoint import ODD, explained, quantisation, quiet

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

_NUMBERS = {"F16", "BF16", "F32", "F64"}  # safetensors' names of what loading casts to the dtype asked for
_INDEX, _SINGLE = "model.safetensors.index.json", "model.safetensors"


class Stored(NamedTuple):
    """A tensor as its file's header describes it."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    size: int  # bytes


def weights_bytes(
    target: str, config: PretrainedConfig, skeleton: PreTrainedModel, dtype: torch.dtype
) -> int:
    """Return the bytes of the target's weights once they are loaded in `dtype`.

    `skeleton` is the model that `config` describes, without weights. Of a quantised checkpoint its tensors
    count in `dtype` too, and what the files hold in other forms (packed weights, scales) as it is stored.
    Weights that would be quantised only while they are loaded, or whose files have no headers to read, count
    as if they were not quantised.
    """
    whole = sum(parameter.numel() for parameter in skeleton.parameters()) * dtype.itemsize
    if quantisation(config) is None or target.endswith(".gguf") or _unpacked(config):
        return whole
    plain = dict(skeleton.named_parameters(remove_duplicate=False))
    counted: set[int] = set()  # tied tensors may be stored twice
    total = 0
    with explained(target):
        stored = list(_stored(target, config))
    for tensor in stored:
        parameter = plain.get(tensor.name)
        if parameter is None or tensor.dtype not in _NUMBERS or tensor.shape != tuple(parameter.shape):
            total += tensor.size
        elif id(parameter) not in counted:
            counted.add(id(parameter))
            total += parameter.numel() * dtype.itemsize
    return total or whole


def _unpacked(config: PretrainedConfig) -> bool:
    """True where loading unpacks a checkpoint, as it does with fp8 where no GPU computes in it."""
    from transformers.quantizers import AutoHfQuantizer

    try:
        with quiet():
            quantiser = AutoHfQuantizer.from_config(config.quantization_config, pre_quantized=True)
            quantiser.validate_environment(device_map=None)
    except ODD:
        return False  # loading says what is wrong; elsewhere it may be right
    return bool(getattr(quantiser.quantization_config, "dequantize", False))


def _stored(target: str, config: PretrainedConfig) -> Iterator[Stored]:
    """Yield the checkpoint's tensors, in a folder, the hub's cache or on the hub; none in another form."""
    folder = Path(target) if Path(target).is_dir() else _cached(target, config)
    if folder is not None and (files := _files(folder)):
        for file in files:
            yield from _header(file)
    elif not Path(target).is_dir():
        yield from _remote(target, config)


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
