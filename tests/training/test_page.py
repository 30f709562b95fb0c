"""A run's page holds its course, and needs no other file."""

from __future__ import annotations

import json
import re
import sys

import pytest

from eagle_train.errors import UserError
from eagle_train.losses.acceptance import AcceptanceCounts
from eagle_train.training.metrics import read_metrics
from eagle_train.training.page import write_page
from eagle_train.training.session import Session

LINE = {"step": 4, "tokens": 9, "seconds": 1.5, "loss": [2.5, None], "tau": 1.25, "skipped": 0}


def test_the_page_shows_every_curve_and_stands_alone(tmp_path, train_tiny):
    pytest.importorskip("matplotlib")
    train_tiny("run", "run.steps=8")
    page = write_page(tmp_path / "run")
    text = page.read_text()
    assert text.count("<svg") == 6
    referred: set[str] = set()
    for picture in re.findall(r"<svg.*?</svg>", text, flags=re.S):
        own = set(re.findall(r'(?:href="#|url\(#)(\w+)', picture))
        assert own
        assert not referred & own, "ids on one page are each picture's own"
        referred |= own
    for forbidden in ("http-equiv", "<script", "<link", 'src="'):
        assert forbidden not in text
    last = read_metrics(tmp_path / "run")[-1]
    assert f"8 steps, {last['tokens']:,} tokens" in text
    assert "eagle3-tiny" in text
    assert "step 2 ahead" in text, "one curve for each test-time step"
    assert f"{last['tau']:.3f} at the last" in text
    assert "ttt_steps: 3" in text
    assert write_page(tmp_path / "run").read_text() == text, "the page depends on the run alone"
    assert train_tiny("run", "run.steps=8")["steps"] == 8, "a page in its folder disturbs no run"


def test_the_best_step_is_the_one_that_training_chose(tmp_path, train_tiny, monkeypatch):
    pytest.importorskip("matplotlib")
    taus = iter([1.4, 1.4, 1.3, 1.4])  # step 0 is untrained; the first of equals is the best
    monkeypatch.setattr(
        Session, "evaluate", lambda *_: AcceptanceCounts(100, round(100 * next(taus)), (100,))
    )
    summary = train_tiny("run", "run.steps=3", "run.eval_every=1")
    assert summary["best_step"] == 1
    assert "3 steps, " in (text := write_page(tmp_path / "run").read_text())
    assert "; acceptance length 1.400 at step 1 (the best), 1.400 at the last." in text


def test_what_cannot_be_drawn_is_one_line(tmp_path, train_tiny, monkeypatch):
    with pytest.raises(UserError, match=r"run\.json: not found; give the --out of eagle train"):
        write_page(tmp_path)
    train_tiny("run", "run.steps=1")
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(UserError, match="matplotlib is not installed; pip install matplotlib"):
        write_page(tmp_path / "run")
    monkeypatch.undo()
    (tmp_path / "run" / "metrics.jsonl").unlink()
    with pytest.raises(UserError, match="no step was reported yet"):
        write_page(tmp_path / "run")


def reported(folder, *texts):
    (folder / "run.json").write_text('{"recipe": "mine"}')
    (folder / "metrics.jsonl").write_text("".join(text + "\n" for text in texts))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"tokens": None}, "step 4: tokens: got nothing, wanted a whole number"),
        ({"seconds": None}, "step 4: seconds: got nothing, wanted a number"),
        ({"tokens": "many"}, "tokens: got 'many', wanted a whole number"),
        ({"tau": "good"}, "tau: got 'good', wanted a number"),
        ({"tau": [1.0]}, "tau: got [1.0], wanted a number"),
        ({"tau": float("nan")}, "tau: got nan, wanted a number"),
        ({"loss": 5}, "loss: got 5, wanted numbers"),
        ({"loss": [[1.0]]}, "loss: got [[1.0]], wanted numbers"),
        ({"lr": 1e200}, "lr: got 1e+200, wanted a number"),
        ({"step": 10**400}, "metrics.jsonl: step: got 10000"),
    ],
)
def test_a_figure_that_is_none_is_one_line(change, words, tmp_path):
    pytest.importorskip("matplotlib")
    reported(tmp_path, json.dumps(LINE), json.dumps(LINE | change))
    with pytest.raises(UserError) as caught:
        write_page(tmp_path)
    assert words in str(caught.value)
    assert len(str(caught.value)) < 300 + len(str(tmp_path))
    assert not (tmp_path / "report.html").exists()


def test_what_is_missing_in_some_lines_leaves_the_rest_drawn(tmp_path):
    pytest.importorskip("matplotlib")
    other = LINE | {"step": 5, "loss": [1.0, 2.0, 3.0]}
    reported(tmp_path, json.dumps(LINE), "[" * 9000, json.dumps(other), json.dumps(LINE | {"loss": None}))
    assert write_page(tmp_path).read_text().count("<svg") == 6
    (tmp_path / "recipe.yaml").write_bytes(b"\xff\xfe")
    with pytest.raises(UserError, match=r"recipe\.yaml: cannot be read as text"):
        write_page(tmp_path)
    (tmp_path / "metrics.jsonl").unlink()
    (tmp_path / "metrics.jsonl").mkdir()
    with pytest.raises(UserError, match=r"metrics\.jsonl: Is a directory"):
        write_page(tmp_path)
