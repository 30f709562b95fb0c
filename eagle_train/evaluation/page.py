"""Evaluations as one HTML page that needs nothing beside itself: figures, plots, a drawn tree."""

from __future__ import annotations

import html
import io
from collections.abc import Callable, Sequence
from typing import Any

from eagle_train.errors import UserError
from eagle_train.evaluation.report import draft_name
from eagle_train.evaluation.tables import cells, set_name

_STYLE = """body{font:15px/1.5 system-ui,sans-serif;max-width:60rem;margin:2rem auto;color:#222}
table{border-collapse:collapse;margin:1rem 0}
td,th{padding:.3rem .8rem;border-bottom:1px solid #ddd;text-align:left}
svg{max-width:100%;height:auto}figure{margin:1.5rem 0}figcaption{color:#555}"""


def as_page(reports: Sequence[dict[str, Any]]) -> str:
    """Return the page for one or more reports of `evaluate`. Raises UserError where matplotlib is missing."""
    try:
        import matplotlib as _  # noqa: F401
    except ImportError as error:
        raise UserError("the HTML report: matplotlib is not installed; pip install matplotlib") from error
    first = reports[0]
    parts = [
        f"<h1>Speculative decoding of {_text(first['target'])}</h1>",
        f"<p>{first['prompts']} prompts, up to {first['max_new_tokens']} new tokens, {first['dtype']}, "
        f"{_text(first['device'])}, {first['threads']} threads. A cell holds tau, the tokens of "
        "a round, and the speed beside plain decoding in the same run.</p>",
        _table(reports),
    ]
    for report in reports:
        parts.append(f"<h2>{_text(set_name(report))}, temperature {report['temperature']:g}</h2>")
        parts += [_figure(caption, draw, report) for caption, draw in _PLOTS]
        parts += [_drawn_round(result) for result in report["results"] if result.get("a_round")]
    body = "\n".join(parts)
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>eagle eval</title>'
        f"<style>{_STYLE}</style></head>\n<body>\n{body}\n</body></html>\n"
    )


def _text(value: Any) -> str:
    return html.escape(str(value))


def _word(token: str) -> str:
    """Return a token's text with a mark for every space and character that cannot be seen."""
    return _text("".join(letter if letter.isprintable() and letter != " " else "\u00b7" for letter in token))


def _name(result: dict[str, Any]) -> str:
    return f"{result['method']}, {draft_name(result['tree'])}"


def _table(reports: Sequence[dict[str, Any]]) -> str:
    heads, table = cells(reports)
    lines = ["<tr><th></th>" + "".join(f"<th>{_text(head)}</th>" for head in heads) + "</tr>"]
    for name, values in table.items():
        lines.append(
            f"<tr><th>{_text(name)}</th>" + "".join(f"<td>{_text(v)}</td>" for v in values) + "</tr>"
        )
    return f"<table>{''.join(lines)}</table>"


def _figure(caption: str, draw: Callable[[Any, dict[str, Any]], None], report: dict[str, Any]) -> str:
    """Draw one plot as inline SVG."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 3.2), layout="constrained")
    axes = figure.subplots()
    draw(axes, report)
    axes.spines[["top", "right"]].set_visible(False)
    if axes.get_legend_handles_labels()[1]:
        axes.legend(frameon=False, fontsize=8)
    picture = io.StringIO()
    salt = f"{caption} {set_name(report)} {report['temperature']}"  # ids of their own on a shared page
    with rc_context({"svg.hashsalt": salt, "svg.fonttype": "none"}):
        figure.savefig(picture, format="svg", metadata={"Date": None})
    svg = picture.getvalue()
    return f"<figure>{svg[svg.index('<svg') :]}<figcaption>{_text(caption)}</figcaption></figure>"


def _by_position(axes: Any, report: dict[str, Any]) -> None:
    for result in report["results"]:
        shares = result["accepted_by_position"]
        axes.plot(range(1, len(shares) + 1), shares, marker="o", label=_name(result))
    axes.set(xlabel="guess", ylabel="share of rounds", ylim=(0, 1))
    axes.xaxis.get_major_locator().set_params(integer=True)


def _histogram(axes: Any, report: dict[str, Any]) -> None:
    width = 0.8 / max(1, len(report["results"]))
    for number, result in enumerate(report["results"]):
        counts = result["accepted_histogram"]
        places = [k + width * number for k in range(len(counts))]
        axes.bar(places, counts, width=width, label=_name(result))
    axes.set(xlabel="accepted guesses", ylabel="rounds")
    axes.xaxis.get_major_locator().set_params(integer=True)


def _speed(axes: Any, report: dict[str, Any]) -> None:
    names = ["plain", *(_name(result) for result in report["results"])]
    rates = [report["plain"]["tokens_per_second"], *(r["tokens_per_second"] for r in report["results"])]
    axes.barh(names[::-1], rates[::-1])
    axes.set(xlabel="tokens per second")


def _classes(key: str, label: str) -> Callable[[Any, dict[str, Any]], None]:
    def draw(axes: Any, report: dict[str, Any]) -> None:
        for result in report["results"]:
            if taus := result[key]:
                axes.plot(list(taus), list(taus.values()), marker="o", label=_name(result))
        axes.set(xlabel=label, ylabel="tau")
        axes.tick_params(axis="x", labelsize=8)

    return draw


_PLOTS = (
    ("Acceptance by position: rounds whose first guesses up to this one all stood.", _by_position),
    ("Rounds by the number of accepted guesses.", _histogram),
    ("Speed, beside plain decoding.", _speed),
    ("Acceptance length by category.", _classes("tau_by_category", "category")),
    (
        "Acceptance length by tokens of the answer before a round.",
        _classes("tau_by_place", "tokens of the answer"),
    ),
    (
        "Acceptance length by tokens of the text before a round.",
        _classes("tau_by_context", "tokens of the text"),
    ),
)


def _drawn_round(result: dict[str, Any]) -> str:
    """Draw the tree of one round: a column for each depth, the nodes that stood in colour."""
    drawn = result["a_round"]
    parents, words, kept = drawn["parents"], drawn["words"], {0, *drawn["accepted"]}
    depth, line, used = [0] * len(parents), [0.0] * len(parents), 0
    children: dict[int, list[int]] = {}
    for node, parent in enumerate(parents[1:], start=1):
        depth[node] = depth[parent] + 1
        children.setdefault(parent, []).append(node)
    for node in _leaves_first(children):
        if node in children:
            line[node] = sum(line[child] for child in children[node]) / len(children[node])
        else:
            line[node], used = used, used + 1
    place = [(20 + 130 * d, 22 + 22 * y) for d, y in zip(depth, line, strict=True)]
    marks = []
    for node, parent in enumerate(parents):
        (x, y), colour = place[node], "#0a7d33" if node in kept else "#999"
        if parent >= 0:
            px, py = place[parent]
            marks.append(f'<line x1="{px}" y1="{py}" x2="{x}" y2="{y}" stroke="{colour}"/>')
        label = f'<text x="{x + 6}" y="{y - 4}" font-size="12" fill="{colour}">{_word(words[node])}</text>'
        marks.append(f'<circle cx="{x}" cy="{y}" r="4" fill="{colour}"/>{label}')
    size = f'width="{150 + 130 * max(depth)}" height="{30 + 22 * max(1, used)}"'
    caption = f"{_name(result)}: the tree of one round; in green what stood."
    svg = f'<svg xmlns="http://www.w3.org/2000/svg" {size}>{"".join(marks)}</svg>'
    return f"<figure>{svg}<figcaption>{_text(caption)}</figcaption></figure>"


def _leaves_first(children: dict[int, list[int]]) -> list[int]:
    """Return all nodes below the root and itself, children before their parent."""
    order, stack = [], [0]
    while stack:
        node = stack.pop()
        order.append(node)
        stack += children.get(node, [])
    return order[::-1]
