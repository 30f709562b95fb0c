"""``.gguf`` files, and what versions of transformers want to be told about them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from eagle_train.errors import UserError


def gguf_source(file: str) -> tuple[str, dict[str, Any]]:
    """Return the folder and the argument by which ``from_pretrained`` finds a .gguf file.

    Raises UserError where there is no such file.
    """
    from transformers.utils import import_utils

    path = Path(file)
    if not path.is_file():
        raise UserError(f"{file}: no such file; give a hub id, a directory or a .gguf file")
    # on Python 3.10 some versions do not find the version of a package whose wheel has no top_level.txt
    mapping = getattr(import_utils, "PACKAGE_DISTRIBUTION_MAPPING", {})
    mapping.setdefault("gguf", ["gguf"])
    return str(path.parent), {"gguf_file": path.name}


def dequantised() -> dict[str, Any]:
    """Return the argument that makes plain weights of a .gguf file's; versions without it always do."""
    try:
        from transformers import GgufConfig
    except ImportError:
        return {}
    return {"quantization_config": GgufConfig(dequantize=True)}
