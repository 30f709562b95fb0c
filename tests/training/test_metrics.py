"""What a run says while it goes on, by value."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from eagle_train.training import metrics
from eagle_train.training.checkpoints import State
from eagle_train.training.metrics import Meter, note
from eagle_train.training.step_result import StepResult


def result(losses, hits, rows):
    return StepResult(torch.zeros(()), torch.tensor(losses), torch.tensor(hits), torch.tensor(rows))


def test_a_report_is_of_steps_taken_and_of_time_spent_training(monkeypatch):
    """Two micro-batches, a skipped step, eight seconds of evaluation; two processes that saw the same."""
    clock = SimpleNamespace(now=100.0)
    monkeypatch.setattr(metrics, "time", SimpleNamespace(monotonic=lambda: clock.now))
    meter = Meter(2, torch.device("cpu"))
    meter.add(result([6.0, 4.0], [2, 1], [4, 2]))
    meter.add(result([2.0, 0.0], [2, 0], [4, 0]))
    meter.close_window(300, taken=True)
    meter.add(result([float("nan"), 1.0], [1, 1], [1, 1]))
    meter.close_window(100, taken=False)
    clock.now += 5.0
    with meter.paused():
        clock.now += 8.0
    clock.now += 3.0
    report = meter.take(SimpleNamespace(sum=lambda values: 2 * values), waited=2.0)
    assert report == {
        "loss": [1.0, 2.0],
        "accuracy": [0.5, 0.5],
        "tokens_per_second": 50.0,
        "data_wait": 0.25,
    }
    clock.now += 4.0
    again = meter.take(SimpleNamespace(sum=lambda values: values), waited=3.0)
    assert again == {
        "loss": [None, None],
        "accuracy": [None, None],
        "tokens_per_second": 0,
        "data_wait": 0.25,
    }


@pytest.mark.parametrize(
    ("minutes", "tau", "at", "words"),
    [
        (None, None, None, "step 1,200, loss 1.250, 50 tokens/s, 25% waiting for data"),
        (
            3.5,
            1.5,
            1200,
            "step 1,200, loss 1.250, tau 1.500, 50 tokens/s, 25% waiting for data, ends within 2.0 minutes",
        ),
        (None, 1.0, 0, "step 1,200, loss 1.250, tau 1.000 at step 0, 50 tokens/s, 25% waiting for data"),
    ],
)
def test_beside_the_bar_stand_loss_acceptance_speed_waiting_and_the_clocks_end(minutes, tau, at, words):
    report = {"loss": [1.25, 2.0], "tokens_per_second": 50.0, "data_wait": 0.25}
    assert note(report, State(step=1200, seconds=90.0, tau=tau, evaluated_step=at), minutes) == words


def test_a_bar_tells_the_time_left(capsys, monkeypatch):
    from eagle_train import progress

    clock = SimpleNamespace(now=0.0)
    monkeypatch.setattr(progress, "time", SimpleNamespace(monotonic=lambda: clock.now))
    bar = progress.Progress("train", 40, "steps")
    clock.now = 20.0
    bar.advance(10, "loss 1.25")
    assert capsys.readouterr().err == "train: 10/40 steps, 0.5/s, 1:00 left, loss 1.25\n"


def test_a_bar_goes_on_from_what_was_done_before_at_the_rate_of_now(capsys, monkeypatch):
    from eagle_train import progress

    clock = SimpleNamespace(now=0.0)
    monkeypatch.setattr(progress, "time", SimpleNamespace(monotonic=lambda: clock.now))
    with progress.progress("train", 40, "steps", before=30) as bar:
        clock.now = 16.0
        bar.advance(8, "step 38")
    said = capsys.readouterr().err
    assert said == "train: 38/40 steps, 0.5/s, 0:04 left, step 38\ntrain: 8 steps in 0:16, 0.5/s\n"
