"""What a run reports: sums over steps since the last report, in metrics.jsonl and to trackers."""

from __future__ import annotations

import contextlib
import json
import math
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from eagle_train.io.paths import os_error
from eagle_train.io.text import write_text
from eagle_train.losses.acceptance import AcceptanceCounts
from eagle_train.progress import span
from eagle_train.training.checkpoints import DIGITS, State
from eagle_train.training.processes import Processes
from eagle_train.training.step_result import StepResult
from eagle_train.training.trackers import Tracker, open_tracker

FILE = "metrics.jsonl"


class Meter:
    """Sums of losses, hits and rows over everything since the last `take`."""

    def __init__(self, num_steps: int, device: torch.device) -> None:
        self._window = torch.zeros((3, num_steps), device=device)
        self._reset(0.0)

    def add(self, result: StepResult) -> None:
        """Add one micro-batch of this process to the window in progress."""
        self._window += torch.stack([part.float() for part in (result.loss_sums, result.hits, result.rows)])

    def close_window(self, tokens: int, taken: bool) -> None:
        """End a window of so many tokens; one whose step was not `taken` leaves no figures."""
        if taken:
            self._sums += self._window
        self._window = torch.zeros_like(self._window)
        self._tokens += tokens

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Leave out the time the block takes: evaluating and saving are not training."""
        begun = time.monotonic()
        yield
        self._started += time.monotonic() - begun

    def take(self, processes: Processes, waited: float) -> dict[str, Any]:
        """Return the report since the last one, summed over processes, and begin anew.

        `loss[i]` and `accuracy[i]` are over the rows counted at step i; `data_wait` is the share of time
        this process waited for data, of `waited` seconds in all.
        """
        losses, hits, rows = processes.sum(self._sums).cpu().double()
        seconds = max(time.monotonic() - self._started, 1e-9)
        report = {
            "loss": _ratios(losses, rows),
            "accuracy": _ratios(hits, rows),
            "tokens_per_second": round(self._tokens / seconds, 1),
            "data_wait": round(min(1.0, max(0.0, waited - self._waited) / seconds), 4),
        }
        self._reset(waited)
        return report

    def _reset(self, waited: float) -> None:
        self._sums = torch.zeros_like(self._window)
        self._tokens, self._waited, self._started = 0, waited, time.monotonic()


class Log:
    """Writes one JSON object a step to metrics.jsonl, and sends the same to the trackers asked for.

    On processes other than the main one it does nothing.
    """

    def __init__(
        self, run: Path, state: State, config: dict[str, Any], trackers: Sequence[str], on: bool
    ) -> None:
        self._file, self._state, self._on = run / FILE, state, on
        self._trackers: list[Tracker] = []
        if on:
            self._lines = [line for line in read_metrics(run) if line["step"] <= state.step]
            self._rewrite()  # without lines past the step that the run goes on from, or a half-written one
            self._trackers = [open_tracker(name, run, config) for name in trackers]

    def write(self, values: dict[str, Any]) -> None:
        """Write a line with the run's position; one of the same step is added to.

        Raises UserError where the disk does not take it.
        """
        if not self._on:
            return
        state = self._state
        line = {"step": state.step, "tokens": state.tokens, "seconds": round(state.seconds, 2), **values}
        line = {key: None if _not_finite(value) else value for key, value in line.items()}
        line["skipped"] = state.skipped
        if self._lines and self._lines[-1]["step"] == state.step:
            self._lines[-1] |= line
            self._rewrite()
        else:
            self._lines.append(line)
            try:
                with open(self._file, "a", encoding="utf-8") as handle:
                    handle.write(json.dumps(line) + "\n")
            except OSError as error:
                raise os_error(self._file, error) from error
        for tracker in self._trackers:
            tracker.log(_flat(line), step=state.step)

    def close(self) -> None:
        """Finish with every tracker."""
        for tracker in self._trackers:
            tracker.finish()

    def _rewrite(self) -> None:
        if self._lines or self._file.exists():
            write_text(self._file, "".join(json.dumps(line) + "\n" for line in self._lines))


def read_metrics(run: Path) -> list[dict[str, Any]]:
    """Return the lines of a run's metrics.jsonl, [] without one; a half-written line is left out.

    Raises UserError where the file cannot be read.
    """
    lines = []
    file = run / FILE
    try:
        texts = file.read_text(encoding="utf-8", errors="replace").splitlines()
    except FileNotFoundError:
        return []
    except OSError as error:
        raise os_error(file, error) from error
    for text in texts:
        try:
            line = json.loads(text)
        except (ValueError, RecursionError):
            continue
        if isinstance(line, dict) and type(line.get("step")) is int:
            lines.append(line)
    return lines


def evaluated(found: AcceptanceCounts | None) -> dict[str, Any]:
    """Return the figures of an evaluation under their names, {} without one."""
    if found is None:
        return {}
    return {
        "tau": round(found.tau, DIGITS),
        "rounds": found.rounds,
        "accepted_by_position": [round(share, 5) for share in found.accepted_by_position],
    }


def note(report: dict[str, Any], state: State, minutes: float | None = None) -> str:
    """Return the few words shown beside the progress of a run that may last so many minutes."""
    earlier = f" at step {state.evaluated_step:,}" if state.evaluated_step not in (None, state.step) else ""
    tau = f", tau {state.tau:.3f}{earlier}" if state.tau else ""
    loss = math.nan if report["loss"][0] is None else report["loss"][0]
    speed = f"{report['tokens_per_second']:,.0f} tokens/s, {report['data_wait']:.0%} waiting for data"
    ends = f", ends within {span(max(0.0, 60 * minutes - state.seconds))}" if minutes else ""
    return f"step {state.step:,}, loss {loss:.3f}{tau}, {speed}{ends}"


def _flat(line: dict[str, Any]) -> dict[str, float]:
    """Turn lists into one number per entry: loss -> loss/0, loss/1, ..; what is not known is left out."""
    flat: dict[str, Any] = {}
    for key, value in line.items():
        flat |= {f"{key}/{i}": v for i, v in enumerate(value)} if isinstance(value, list) else {key: value}
    return {key: value for key, value in flat.items() if value is not None}


def _not_finite(value: Any) -> bool:
    return isinstance(value, float) and not math.isfinite(value)


def _ratios(sums: Tensor, rows: Tensor) -> list[float | None]:
    """Return sums per row, None where no row counted or the sum is not finite (JSON has no NaN)."""
    ratios = (sums / rows).tolist()
    return [round(ratio, 6) if math.isfinite(ratio) else None for ratio in ratios]
