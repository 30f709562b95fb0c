"""What the headers of a checkpoint's safetensors files say of its tensors, before any is read."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from safetensors import SafetensorError

from eagle_train import hub

if TYPE_CHECKING:
    from transformers import PretrainedConfig

_INDEX, _SINGLE = "model.safetensors.index.json", "model.safetensors"


class Stored(NamedTuple):
    """A tensor as its file's header describes it."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    size: int  # bytes


def stored_tensors(target: str, config: PretrainedConfig) -> list[Stored]:
    """Return the checkpoint's tensors, in a folder, the hub's cache or on the hub; none in another form."""
    found = local_tensors(target, config)
    return found if found or Path(target).is_dir() else list(_remote(target, config))


def local_tensors(target: str, config: PretrainedConfig) -> list[Stored]:
    """Return the tensors of a checkpoint in a folder or in the hub's cache; none where it is in neither."""
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
        text = handle.read(min(length, file.stat().st_size))
    try:
        for name, entry in json.loads(text).items():
            if name != "__metadata__":
                first, end = entry["data_offsets"]
                yield Stored(name, entry["dtype"], tuple(entry["shape"]), end - first)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise SafetensorError(f"{file.name}: no header") from error


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
