"""Our exported heads in SGLang's own model classes, on a CPU: every parameter and the logits of fixed inputs.

    python scripts/sglang_check.py HEAD [HEAD ...] [--engine-env .venv-sglang] [--json FIGURES]

HEAD is a run or a head directory. SGLang's server needs a GPU, but the classes of its wheel load and run
without one (sglang_load.py). For every head, exported with `eagle export --engine sglang`, this checks that
 - load_weights sets every parameter of the class that is not the target's, each to the file's values;
 - the hot token ids are the head's draft vocabulary;
 - two steps of the class's forward give what the trained head gives, in float32.
Exits 1 where anything differs, and says where. The environment is built on the first use (about 1 GB to
fetch, 2 GB on disk) and kept. Part of a release's checks, not of `make test`.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from engine_env import engine_python, pip_install

from eagle_train.export.export import export
from eagle_train.heads.foreign import read_any

ENGINE = "sglang==0.5.23"
ALONE = (ENGINE, "triton==3.7.1", "compressed-tensors==0.18.0")  # what they ask for is not taken
BESIDE = [
    "aiohttp",
    "apache-tvm-ffi",
    "dill",
    "gguf",
    "ipython",
    "loguru",
    "msgspec",
    "numpy",
    "openai==2.8.0",
    "orjson",
    "partial-json-parser",
    "pillow",
    "psutil",
    "pybase64",
    "pyzmq",
    "requests",
    "safetensors",
    "sentencepiece",
    "starlette",
    "transformers==5.24.0",
]
CLOSE = 1e-4  # of the largest output: float32, sums in another order
HERE = Path(__file__).parent


def install_sglang(python: Path) -> None:
    """Install what its model classes import, then the wheels alone."""
    pip_install(python, *BESIDE)
    pip_install(python, "--no-deps", *ALONE)


def check_head(source: str, python: Path) -> dict[str, Any]:
    """Export one head and load it in the engine's class; return figures and faults."""
    with tempfile.TemporaryDirectory() as folder:
        out, result = Path(folder) / "head", Path(folder) / "result.json"
        export(source, out, engine="sglang", dtype="fp32")
        command = [str(python), str(HERE / "sglang_load.py"), str(out), str(result)]
        alone = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
        done = subprocess.run(command, env=alone, capture_output=True, text=True)
        if done.returncode:
            sys.exit(f"the engine failed:\n{done.stderr[-4000:]}")
        found: dict[str, Any] = json.loads(result.read_text(encoding="utf-8"))
        head = read_any(out)
    ids, hot = head.draft_ids, found.pop("hot_token_ids")
    wanted = ids.tolist() if head.config.kind == "eagle3" and head.config.reduced_vocabulary else None
    if hot != wanted:
        found["faults"].append("hot token ids are not the draft vocabulary")
    if not found["largest_difference"] <= CLOSE * found["largest_output"]:
        found["faults"].append(f"outputs differ by {found['largest_difference']:.3g}")
    return {"head": source, "draft_vocab_size": head.config.draft_vocab_size, **found}


def main() -> int:
    """Check every head given; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("heads", nargs="+", metavar="HEAD")
    parser.add_argument("--engine-env", type=Path, default=Path(".venv-sglang"))
    parser.add_argument("--json", type=Path, help="write the figures here too")
    asked = parser.parse_args()

    python = engine_python(asked.engine_env.absolute(), ENGINE, install_sglang)
    results = [check_head(head, python) for head in asked.heads]
    for one in results:
        print(
            f"{one['head']}: {one['class']}, draft vocabulary {one['draft_vocab_size']:,}, "
            f"{one['parameters']} parameters; outputs up to {one['largest_output']:.4g} differ by "
            f"{one['largest_difference']:.2g}; faults: {', '.join(one['faults']) or 'none'}"
        )
    if asked.json:
        asked.json.write_text(json.dumps({"engine": ENGINE, "results": results}, indent=2), encoding="utf-8")
    return 1 if any(one["faults"] for one in results) else 0


if __name__ == "__main__":
    sys.exit(main())
