"""Tensors on disk: one safetensors file."""

from __future__ import annotations

import errno
import os
from collections.abc import Mapping
from typing import TYPE_CHECKING

from eagle_train.errors import UserError
from eagle_train.io.paths import os_error, refuse_special
from eagle_train.io.whole_file import replacing

if TYPE_CHECKING:
    import torch

_HIDDEN = ((errno.ENOSPC, "No space left"), (errno.EDQUOT, "quota"), (errno.EFBIG, "File too large"))


def save_tensors(
    path: str | os.PathLike[str],
    tensors: Mapping[str, torch.Tensor],
    metadata: Mapping[str, str] | None = None,
) -> None:
    """Write tensors as one safetensors file, whole or not at all. The bytes depend only on content.

    safetensors writes tensors in a fixed order but its metadata map in an arbitrary one, so callers
    that need equal bytes pass at most one metadata key (a JSON text under it is fine).
    """
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    contiguous = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    with replacing(path) as temporary:
        try:
            save_file(contiguous, str(temporary), metadata=dict(metadata) if metadata else None)
        except SafetensorError as error:  # it hides the operating system's error in its text
            for number, words in _HIDDEN:
                if words in str(error):
                    raise OSError(number, os.strerror(number)) from error
            raise
        temporary.chmod(0o666 & ~_umask())  # safetensors makes its files private


def _umask() -> int:
    mask = os.umask(0o022)
    os.umask(mask)
    return mask


def load_tensors(path: str | os.PathLike[str]) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """Read a whole safetensors file: its tensors (on the CPU) and its metadata.

    Raises UserError for a missing or damaged file, or what is no file.
    """
    from safetensors import SafetensorError, safe_open

    refuse_special(path)
    try:
        with safe_open(os.fspath(path), framework="pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            return tensors, dict(file.metadata() or {})
    except FileNotFoundError as error:
        raise UserError(f"{os.fspath(path)}: not found") from error
    except OSError as error:
        raise os_error(path, error) from error
    except SafetensorError as error:
        raise UserError(f"{os.fspath(path)}: damaged or not safetensors ({error})") from error
