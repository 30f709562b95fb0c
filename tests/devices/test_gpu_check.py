"""The check for a GPU machine runs whole on a pretend one."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import sys
from pathlib import Path

from eagle_train.decoding.loop import Settings

FILE = Path(__file__).parents[2] / "scripts" / "gpu_check.py"


def test_all_checks_and_measurements_of_the_gpu_check_run(gpu, monkeypatch, capsys):
    monkeypatch.syspath_prepend(str(FILE.parent))
    spec = importlib.util.spec_from_file_location("gpu_check", FILE)
    check = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(check)
    monkeypatch.setattr(check, "SMALL", dataclasses.replace(check.TINY, vocab=1024))
    monkeypatch.setattr(check, "Settings", lambda max_new_tokens, **more: Settings(5, **more))  # few tokens
    words = ["gpu_check", "--device", "cuda", "--small", "--minutes", "1000", "--seconds", "0", "--json"]
    monkeypatch.setattr(sys, "argv", words)
    assert check.main() == 0
    found = json.loads(capsys.readouterr().out)
    assert found["device"] == "Pretend"
    assert [one["fine"] for one in found["report"] if "check" in one] == [True] * 4
    (attention,) = (one for one in found["report"] if one.get("check") == "attention")
    assert attention["by kernels (16, 32 bits)"] == [True, True]
    measured = [one for one in found["report"] if "measured" in one]
    assert [one["measured"].split(",")[0] for one in measured] == [
        "extraction and decoding",
        "training",
        "training",
    ]
    assert all(one["peak_gib"] > 0 and one["tokens_per_second"] > 0 for one in measured)
