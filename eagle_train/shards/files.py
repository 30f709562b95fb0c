"""One shard file: its header parsed and checked without reading its tensors, tensors mapped into memory."""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from eagle_train.errors import UserError
from eagle_train.io.checksums import sha256_file
from eagle_train.io.paths import os_error, refuse_special
from eagle_train.shards.schema import HEADER_KEY, MANIFEST, PLAN

_DTYPES = {
    "F32": torch.float32,
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "F8_E4M3": torch.float8_e4m3fn,
    "I64": torch.int64,
    "I32": torch.int32,
    "I8": torch.int8,
    "U8": torch.uint8,
}
DTYPE_NAMES = {dtype: name for name, dtype in _DTYPES.items()}
_TENSORS = {
    "input_ids",
    "loss_mask",
    "rows",
    "row_starts",
    "spans",
    "span_starts",
    "label_argmax",
    "label_lse",
}
_TOP_LABELS = {"label_ids", "label_logp"}
_HEADER: dict[str, type] = {
    "plan": str,
    "shard": int,
    "tokens": int,
    "labels": int,
    "row_ids": list,
    "conversation_ids": list,
    "skipped": list,
    "target": dict,
    "checksums": dict,
}


@dataclass(frozen=True)
class ShardFile:
    """A shard whose size agrees with its header: nothing is cut off."""

    path: Path
    header: dict[str, Any]  # what the writer recorded, schema.py
    layout: dict[str, tuple[torch.dtype, tuple[int, ...], int]]  # dtype, shape, first byte in the file
    size: int  # bytes of the file

    def map(self) -> dict[str, Tensor]:
        """Map all tensors into memory, copy-on-write; pages are read when touched.

        A map needs no file descriptor. Raises UserError where the file is not as it was.
        """
        try:
            whole = torch.from_file(str(self.path), shared=False, size=self.size, dtype=torch.uint8)
        except RuntimeError as error:
            open_shard(self.path)  # says what is wrong with the file
            raise UserError(f"{self.path}: cannot be mapped into memory: {error}") from error
        return {
            name: whole[first : first + dtype.itemsize * prod(shape)].view(dtype).view(shape)
            for name, (dtype, shape, first) in self.layout.items()
        }

    def verify(self) -> None:
        """Read every byte and compare with the header's checksums; raise UserError naming the tensor."""
        for name, tensor in self.map().items():
            if checksum(tensor) != self.header["checksums"].get(name):
                raise UserError(
                    f"{self.path}: tensor {name} is damaged (checksum differs); {mend_shard(self.path)}"
                )


def checksum(tensor: Tensor) -> str:
    """Return the SHA-256 of a contiguous CPU tensor's bytes."""
    if tensor.numel() == 0:
        return hashlib.sha256(b"").hexdigest()
    return hashlib.sha256(tensor.reshape(-1).view(torch.uint8).numpy().data).hexdigest()


def mend_shard(path: Path) -> str:
    """Say what to do about a damaged shard: merged or split shards have no extraction to make it anew."""
    if not (path.parent / PLAN).is_file() and (path.parent / MANIFEST).is_file():
        return f"leave it out with eagle shards prune {path.parent} --damaged"
    return "run the same eagle extract again: it makes this shard anew"


def _check_header(header: dict[str, Any]) -> None:
    for name, kind in _HEADER.items():
        if type(header[name]) is not kind:
            raise TypeError(f"{name}: {str(header[name])[:40]!r}")
    for name in ("row_ids", "conversation_ids", "categories"):
        texts = header.get(name, header["row_ids"])
        if len(texts) != len(header["row_ids"]) or not all(isinstance(text, str) for text in texts):
            raise TypeError(f"{name}: not a text for each row")


def open_shard(path: Path) -> ShardFile:
    """Read the header of a shard; raise UserError when the file is missing, cut or not a shard."""
    refuse_special(path)
    try:
        with open(path, "rb") as handle:
            size = os.fstat(handle.fileno()).st_size
            length = int.from_bytes(handle.read(8), "little")
            if size < 8 or length > size - 8:
                raise UserError(f"{path}: cut off or not a shard ({size} bytes); {mend_shard(path)}")
            text = handle.read(length)
    except FileNotFoundError as error:
        raise UserError(f"{path}: missing; {mend_shard(path)}") from error
    except OSError as error:
        raise os_error(path, error) from error
    try:
        entries = json.loads(text)
        header = json.loads(entries.pop("__metadata__")[HEADER_KEY])
        _check_header(header)
        layout, end = {}, 8 + length
        for name, entry in entries.items():
            first, last = entry["data_offsets"]
            dtype, shape = _DTYPES[entry["dtype"]], tuple(entry["shape"])
            if first < 0 or min(shape, default=0) < 0 or last - first != dtype.itemsize * prod(shape):
                raise ValueError(f"tensor {name} has the wrong size")
            if (8 + length + first) % dtype.itemsize:
                raise ValueError(f"tensor {name} begins inside a value")
            layout[name] = (dtype, shape, 8 + length + first)
            end = max(end, 8 + length + last)
        if absent := (_TENSORS | (_TOP_LABELS if "label_top_k" in header else {"last"})) - set(layout):
            raise KeyError(f"lacks tensor {min(absent)}")
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        raise UserError(f"{path}: damaged header ({error}); {mend_shard(path)}") from error
    if end != size:
        raise UserError(
            f"{path}: {size:,} bytes, its header says {end:,}: cut off or damaged; {mend_shard(path)}"
        )
    return ShardFile(path, header, layout, size)


def refuse_other_file(folder: Path, name: str, checksum: str | None, again: str) -> None:
    """Raise UserError where a file is there that is not the one of this SHA-256; None: it is not known."""
    file = folder / name
    try:
        if checksum is not None and file.is_file() and sha256_file(file) != checksum:
            raise UserError(f"{file}: not the file that {MANIFEST} lists (checksum differs); {again}")
    except OSError as error:
        raise os_error(file, error) from error
