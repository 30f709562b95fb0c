"""The check for a GPU machine runs in a reduced form without one."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path


def test_it_checks_and_measures_on_a_cpu_and_needs_few_packages():
    file = Path(__file__).parents[2] / "scripts" / "gpu_check.py"
    unwanted = ("typer", "rich", "datasets", "platformdirs", "gguf")
    program = f"""
import runpy, sys
sys.modules.update(dict.fromkeys({unwanted!r}))
sys.path[0] = {str(file.parent)!r}
sys.argv = "gpu_check --json --device cpu --seconds 0".split()
runpy.run_path({str(file)!r}, run_name="__main__")
"""
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)["report"]
    assert [found["fine"] for found in report if "check" in found] == [True] * 4
    training = [found for found in report if "share_of_matrix_rate" in found]
    assert [found["share"] for found in training] == [0.6, 1.0]
    assert all(found["tokens_per_second"] > 0 for found in training)
