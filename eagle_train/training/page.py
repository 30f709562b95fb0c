"""A run as one HTML page that needs nothing beside itself: what was trained, and its course as plots."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from eagle_train.errors import UserError
from eagle_train.io.text import read_json, write_text
from eagle_train.page import as_html, as_text, check_matplotlib, plot
from eagle_train.progress import counted, span
from eagle_train.training.checkpoints import State
from eagle_train.training.metrics import FILE as METRICS
from eagle_train.training.metrics import read_metrics
from eagle_train.training.run_folder import RECIPE, RECORD

FILE = "report.html"
Lines = Sequence[dict[str, Any]]

_FACTS = (
    ("num_parameters", "parameters trained"),
    ("draft_vocab_size", "draft vocabulary"),
    ("coverage", "share of answer tokens in it"),
    ("train_rows", "rows trained on"),
    ("held_out_conversations", "conversations held out"),
    ("precision", "precision"),
    ("processes", "processes"),
    ("init_from", "started from"),
    ("tool_version", "eagle"),
    ("torch_version", "torch"),
)
_MOST = 1e100  # far above any figure, and drawn without overflow
_FIELDS = {  # of a line of metrics: what it is, and whether a line always has it
    "step": ("a whole number", True),
    "tokens": ("a whole number", True),
    "seconds": ("a number", True),
    "skipped": ("a whole number", False),
    "tau": ("a number", False),
    "lr": ("a number", False),
    "grad_norm": ("a number", False),
    "tokens_per_second": ("a number", False),
    "loss": ("numbers", False),
    "accuracy": ("numbers", False),
}


def write_page(run: str | Path) -> Path:
    """Write run/report.html and return its path.

    Raises UserError where the folder holds no run, nothing was reported yet, a figure is none, or matplotlib
    is missing.
    """
    folder = Path(run)
    record = read_json(folder / RECORD, "give the --out of eagle train")
    lines = read_metrics(folder)
    if not lines:
        raise UserError(f"{folder}: no step was reported yet; train first")
    for line in lines:
        if odd := _odd(line):
            raise UserError(f"{folder / METRICS}: {odd}; take that line out, or train again")
    write_text(folder / FILE, page(folder, record, lines))
    return folder / FILE


def _odd(line: dict[str, Any]) -> str | None:
    """Return what in a line of metrics cannot be drawn, None where all is as `Log.write` has it."""
    for key, (wanted, needed) in _FIELDS.items():
        value = line.get(key)
        if value is None and not needed:
            continue
        values = value if wanted == "numbers" and isinstance(value, list) else [value]
        fine = (wanted == "numbers") == isinstance(value, list) and all(
            (type(one) is int or (type(one) is float and wanted != "a whole number")) and abs(one) < _MOST
            for one in values
            if not (wanted == "numbers" and one is None)
        )
        if not fine:
            where = f"step {str(line['step'])[:20]}: " if key != "step" else ""
            got = "nothing" if value is None else repr(value)[:40]
            return f"{where}{key}: got {got}, wanted {wanted}"
    return None


def _recipe_text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8") if file.is_file() else ""
    except (OSError, UnicodeError) as error:
        raise UserError(f"{file}: cannot be read as text ({error}); train again") from error


def page(folder: Path, record: dict[str, Any], lines: Lines) -> str:
    """Return the page of a run whose run.json is `record` and whose metrics are `lines`."""
    check_matplotlib("eagle report")
    facts = [(words, _shown(key, record[key])) for key, words in _FACTS if record.get(key) not in (None, "")]
    rows = "".join(f"<tr><th>{as_text(words)}</th><td>{as_text(x)}</td></tr>" for words, x in facts)
    parts = [
        f"<h1>{as_text(folder.resolve().name)}: {as_text(record.get('recipe'))}</h1>",
        f"<p>{as_text(_course(lines))}</p><table>{rows}</table>",
        *(plot(caption, draw, lines, caption) for caption, draw in _PLOTS),
        f"<h2>Recipe</h2><pre>{as_text(_recipe_text(folder / RECIPE))}</pre>",
    ]
    return as_html("eagle train", parts)


def _course(lines: Lines) -> str:
    last, judged = lines[-1], State()
    for line in lines:
        if line.get("tau"):
            judged.judge(line["step"], line["tau"])
    words = f"{counted(last['step'], 'step')}, {counted(last['tokens'], 'token')} in {span(last['seconds'])}"
    if last.get("skipped"):
        words += f", {counted(last['skipped'], 'step')} skipped"
    if judged.tau is not None:
        best = judged.best_step
        words += "; acceptance length "
        words += "" if best is None else f"{judged.best_tau:.3f} at step {best:,} (the best), "
        words += f"{judged.tau:.3f} at the last"
    return words + "."


def _shown(key: str, value: Any) -> Any:
    if key == "coverage" and type(value) is float:
        return f"{value:.2%}"
    return f"{value:,}" if type(value) is int else value


def _series(lines: Lines, key: str, place: int | None = None) -> tuple[list[int], list[float]]:
    """Return the steps and values at which a figure is known."""
    given = [(line["step"], line[key]) for line in lines if line.get(key) is not None]
    if place is not None:
        given = [(step, values[place]) for step, values in given if place < len(values)]
    known = [(step, value) for step, value in given if value is not None]
    return [step for step, _ in known], [value for _, value in known]


def _per_step(key: str) -> Callable[[Any, Lines], None]:
    def draw(axes: Any, lines: Lines) -> None:
        width = max((len(line.get(key) or ()) for line in lines), default=0)
        for place in range(width):
            axes.plot(*_series(lines, key, place), linewidth=1, label=f"step {place} ahead")
        axes.set(xlabel="step", ylabel=key)

    return draw


def _one(key: str, label: str, **style: Any) -> Callable[[Any, Lines], None]:
    def draw(axes: Any, lines: Lines) -> None:
        axes.plot(*_series(lines, key), linewidth=1, **style)
        axes.set(xlabel="step", ylabel=label)

    return draw


_PLOTS = (
    (
        "Acceptance length on held-out conversations, a greedy chain, predicted without decoding",
        _one("tau", "tau", marker="o"),
    ),
    ("Loss of each test-time step", _per_step("loss")),
    ("Share of rows whose first guess is the target's", _per_step("accuracy")),
    ("Learning rate", _one("lr", "learning rate")),
    ("Norm of the gradient before clipping", _one("grad_norm", "norm")),
    ("Tokens per second in training, evaluations and saving left out", _one("tokens_per_second", "tokens/s")),
)
