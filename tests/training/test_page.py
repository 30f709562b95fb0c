"""A run's page holds its course, and needs no other file."""

from __future__ import annotations

import sys

import pytest

from eagle_train.errors import UserError
from eagle_train.training.metrics import read_metrics
from eagle_train.training.page import write_page


def test_the_page_shows_every_curve_and_stands_alone(tmp_path, train_tiny):
    pytest.importorskip("matplotlib")
    train_tiny("run", "run.steps=8")
    page = write_page(tmp_path / "run")
    text = page.read_text()
    assert text.count("<svg") == 6
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
