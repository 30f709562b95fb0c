"""What follows a run elsewhere gets every line of it."""

from __future__ import annotations

import sys

import pytest

from eagle_train.errors import UserError
from eagle_train.training import trackers
from eagle_train.training.metrics import read_metrics


class Notebook:
    """A tracker that remembers."""

    def __init__(self, run, config):
        self.run, self.config, self.lines, self.finished = run, config, {}, False

    def log(self, values, step):
        self.lines[step] = values

    def finish(self):
        self.finished = True


def test_trackers_get_every_line_as_plain_numbers(tmp_path, train_tiny, monkeypatch):
    opened = []
    monkeypatch.setitem(
        trackers._MAKERS, "wandb", lambda *given: opened.append(Notebook(*given)) or opened[-1]
    )
    train_tiny("run", trackers=["wandb"])
    [book] = opened
    assert book.finished
    assert book.run == tmp_path / "run"
    assert book.config["run"]["steps"] == 8
    assert sorted(book.lines) == list(range(9))
    line = read_metrics(tmp_path / "run")[4]
    assert book.lines[4]["loss/1"] == line["loss"][1]
    assert book.lines[4]["tau"] == line["tau"]
    assert all(type(value) in (int, float) for values in book.lines.values() for value in values.values())


def test_a_tracker_that_is_not_installed_is_one_line(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "trackio", None)
    with pytest.raises(UserError, match="--track: trackio is not installed; pip install trackio"):
        trackers.open_tracker("trackio", tmp_path, {})


def test_tensorboard_writes_events(tmp_path, train_tiny):
    pytest.importorskip("tensorboard")
    train_tiny("run", trackers=["tensorboard"])
    assert list((tmp_path / "run" / "tensorboard").glob("events.out.*"))
