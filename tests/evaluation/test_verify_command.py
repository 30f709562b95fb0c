"""``eagle verify``: equal answers pass, a wrong token is exit 1, rounding in bf16 is told from a fault."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from eagle_cli.main import main
from eagle_train.evaluation import comparison
from eagle_train.evaluation.assurance import explained
from eagle_train.evaluation.comparison import first_difference
from eagle_train.targets.load import load_target


@pytest.fixture(scope="module")
def head_dir(head_dir: Path) -> str:
    return str(head_dir)


def verify(head: str, target: Path, *more: object) -> int:
    few = ("--num-questions", 2, "--max-turns", 1, "--max-new-tokens", 10)
    with pytest.raises(SystemExit) as left:
        main([str(word) for word in ("verify", head, "--target", target, *few, *more)])
    return int(left.value.code or 0)


def test_equal_answers_pass_in_both_dtypes(head_dir, tiny_target_dir, capsys):
    assert verify(head_dir, tiny_target_dir, "--json") == 0
    report = json.loads(capsys.readouterr().out)
    assert [check["dtype"] for check in report["checks"]] == ["fp32", "fp32", "bf16", "bf16"]
    assert report["checks"][0]["differences"] == []
    assert report["unexplained"] == []
    assert verify(head_dir, tiny_target_dir, "--dtype", "fp32", "--draft", "chain") == 0
    out, told = capsys.readouterr()
    assert told.startswith("verify: 2 prompts by plain decoding and 1 other way, up to 10 tokens each: ")
    assert "\nverify: 40 tokens in 0:0" in told
    assert "eval: " not in told
    assert "fp32, eagle3, chain of 3" in out
    assert "2 of 2 answers equal" in out
    assert out.splitlines()[-1] == f"next: eagle tune {head_dir} --target {tiny_target_dir}"


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_a_wrong_token_is_exit_1_and_one_line(head_dir, tiny_target_dir, capsys, monkeypatch, dtype):
    def wrong(*given, **more):
        made = real(*given, **more)
        made.ids[3] = (made.ids[3] + 17) % 300
        return made

    real = comparison.generate
    monkeypatch.setattr(comparison, "generate", wrong)
    assert verify(head_dir, tiny_target_dir, "--dtype", dtype, "--draft", "chain") == 1
    captured = capsys.readouterr()
    (line,) = [line for line in captured.err.splitlines() if line.startswith("error: ")]
    assert line.startswith(
        f"error: 2 answers differ from plain decoding beyond rounding; first in {dtype}, eagle3"
    )
    assert "token 3" in line
    assert captured.out.count("NOT explained by rounding") == 2


def test_what_rounding_explains(tiny_target_dir):
    near = {"below": 0.05, "noise": 0.02, "best": 3.0}
    assert explained(near, "bf16")
    assert not explained(near, "fp32")
    assert explained({**near, "below": 5e-4}, "fp32")
    assert not explained({**near, "below": 0.5}, "bf16")
    target = load_target(str(tiny_target_dir), dtype="bf16", device="cpu")
    prompt = [5, 17, 250, 33, 8, 121, 64]
    logits = target.logits(target.run_body(torch.tensor([prompt]))[0, -1]).float()
    first, second, third, *_ = logits.argsort(descending=True).tolist()
    found = first_difference(target, prompt, [first, 9], [third, 9])
    assert found["gap"] == pytest.approx(float(logits[first] - logits[second]))
    assert found["below"] == pytest.approx(float(logits[first] - logits[third]))
    assert found["best"] == pytest.approx(float(logits[first]))
    assert 0 <= found["noise"] < 0.5
    assert (found["at"], found["plain_token"], found["token"]) == (0, first, third)
