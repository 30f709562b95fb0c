"""Evaluations as one HTML page that needs nothing beside itself: figures, plots, a drawn tree."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from eagle_train.evaluation.report import output_words, predicted_lines, short_sources, way_name
from eagle_train.evaluation.tables import cells, set_name
from eagle_train.page import as_html, as_text, check_matplotlib, figure, plot
from eagle_train.progress import counted

TITLE = "eagle eval"  # that of every page of figures begins so


def as_page(reports: Sequence[dict[str, Any]]) -> str:
    """Return the page for one or more reports of `evaluate`. Raises UserError where matplotlib is missing."""
    check_matplotlib("the HTML report")
    first = reports[0]
    parts = [
        f"<h1>Speculative decoding of {as_text(first['target'])}</h1>",
        f"<p>{counted(first['prompts'], 'prompt')}, up to {counted(first['max_new_tokens'], 'new token')}, "
        f"{first['dtype']}, "
        f"{as_text(first['device'])}, {counted(first['threads'], 'thread')}. A cell holds tau, the tokens of "
        "a round, and the speed beside plain decoding in the same run.</p>",
        _table(reports),
    ]
    for report in reports:
        name = f"{set_name(report)} {report['temperature']}"
        parts.append(f"<h2>{as_text(set_name(report))}, temperature {report['temperature']:g}</h2>")
        parts.append(_figures(report))
        parts += [plot(caption, draw, report, f"{caption} {name}") for _, caption, draw in _PLOTS]
        drawn = zip(_names(report), report["results"], strict=True)
        parts += [_drawn_round(name, result["a_round"]) for name, result in drawn if result.get("a_round")]
    return as_html(TITLE, parts)


def predicted_page(report: dict[str, Any]) -> str:
    """Return the page for a report of `predict`, with a plot of whatever it tells."""
    check_matplotlib("the HTML report")
    text = as_text("\n".join(predicted_lines(report)))
    drawn = {"results": [{**report, "method": report["kind"]}]}
    plots = [plot(caption, draw, drawn, caption) for key, caption, draw in _PLOTS if report.get(key)]
    parts = [
        f"<h1>Acceptance on {as_text(report['texts'])}, predicted</h1>",
        f'<pre style="white-space:pre-wrap">{text}</pre>',
        *plots,
    ]
    return as_html(f"{TITLE} --predict", parts)


def _word(token: str) -> str:
    """Return a token's text with a mark for every space and character that cannot be seen."""
    return as_text(
        "".join(letter if letter.isprintable() and letter != " " else "\u00b7" for letter in token)
    )


def _names(report: dict[str, Any]) -> list[str]:
    """Return the name of every way of decoding, told apart from the others."""
    sources = short_sources(report["results"])
    return [way_name(result, sources) for result in report["results"]]


def _table(reports: Sequence[dict[str, Any]]) -> str:
    heads, table = cells(reports)
    return _html_table(heads, table.items())


def _figures(report: dict[str, Any]) -> str:
    """Return what the table over all sets has no room for: speeds, and what the output is."""
    heads = ["tau", "tokens/s", "times plain", "round / plain token", "output"]
    alone = ["1.000", f"{report['plain']['tokens_per_second']:.1f}", "1.00", "1.00", ""]
    ways = [
        [
            f"{result['tau']:.3f}",
            f"{result['tokens_per_second']:.1f}",
            f"{result['speedup']:.2f}",
            f"{result['round_cost']:.2f}",
            output_words(result),
        ]
        for result in report["results"]
    ]
    return _html_table(heads, [("plain", alone), *zip(_names(report), ways, strict=True)])


def _html_table(heads: Sequence[str], rows: Iterable[tuple[str, Sequence[str]]]) -> str:
    lines = ["<tr><th></th>" + "".join(f"<th>{as_text(head)}</th>" for head in heads) + "</tr>"]
    for name, values in rows:
        cells_of = "".join(f"<td>{as_text(value)}</td>" for value in values)
        lines.append(f"<tr><th>{as_text(name)}</th>{cells_of}</tr>")
    return f"<table>{''.join(lines)}</table>"


def _by_position(axes: Any, report: dict[str, Any]) -> None:
    for name, result in zip(_names(report), report["results"], strict=True):
        shares = result["accepted_by_position"]
        axes.plot(range(1, len(shares) + 1), shares, marker="o", label=name)
    axes.set(xlabel="guess", ylabel="share of rounds", ylim=(0, 1))
    axes.xaxis.get_major_locator().set_params(integer=True)


def _histogram(axes: Any, report: dict[str, Any]) -> None:
    width = 0.8 / max(1, len(report["results"]))
    first = -width * (len(report["results"]) - 1) / 2  # so that the bars of a count stand about its mark
    for number, (name, result) in enumerate(zip(_names(report), report["results"], strict=True)):
        counts = result["accepted_histogram"]
        places = [k + first + width * number for k in range(len(counts))]
        axes.bar(places, counts, width=width, label=name)
    axes.set(xlabel="accepted guesses", ylabel="rounds")
    axes.xaxis.get_major_locator().set_params(integer=True)


def _speed(axes: Any, report: dict[str, Any]) -> None:
    names = ["plain", *_names(report)]
    rates = [report["plain"]["tokens_per_second"], *(r["tokens_per_second"] for r in report["results"])]
    axes.barh(names[::-1], rates[::-1])
    axes.set(xlabel="tokens per second")


def _classes(key: str, label: str, line: str = "-") -> Callable[[Any, dict[str, Any]], None]:
    def draw(axes: Any, report: dict[str, Any]) -> None:
        for name, result in zip(_names(report), report["results"], strict=True):
            if taus := result[key]:
                axes.plot(list(taus), list(taus.values()), marker="o", linestyle=line, label=name)
        axes.set(xlabel=label, ylabel="tau")
        axes.set_ylim(bottom=1)  # that of a head that is never right
        axes.tick_params(axis="x", labelsize=8)

    return draw


_PLOTS = (  # each behind the figure that it needs
    (
        "accepted_by_position",
        "Acceptance by position: rounds whose first guesses up to this one all stood.",
        _by_position,
    ),
    ("accepted_histogram", "Rounds by the number of accepted guesses.", _histogram),
    ("tokens_per_second", "Speed, beside plain decoding.", _speed),
    (
        "tau_by_category",
        "Acceptance length by category.",
        _classes("tau_by_category", "category", line=""),
    ),
    (
        "tau_by_place",
        "Acceptance length by tokens of the answer before a round.",
        _classes("tau_by_place", "tokens of the answer"),
    ),
    (
        "tau_by_context",
        "Acceptance length by tokens of the text before a round.",
        _classes("tau_by_context", "tokens of the text"),
    ),
)


def _drawn_round(name: str, drawn: dict[str, Any]) -> str:
    """Draw the tree of one round: a column for each depth, the nodes that stood in colour."""
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
        (x, y), colour = place[node], "#0a7d33" if node in kept else "#666"
        if parent >= 0:
            px, py = place[parent]
            marks.append(f'<line x1="{px}" y1="{py}" x2="{x}" y2="{y}" stroke="{colour}"/>')
        halo = 'paint-order="stroke" stroke="#fff" stroke-width="3"'  # or edges run through the words
        at = f'x="{x + 6}" y="{y - 4}" font-size="12" fill="{colour}"'
        label = f"<text {at} {halo}>{_word(words[node])}</text>"
        marks.append(f'<circle cx="{x}" cy="{y}" r="4" fill="{colour}"/>{label}')
    width, height = 150 + 130 * max(depth), 30 + 22 * max(1, used)
    size = f'width="{width}" height="{height}" viewBox="0 0 {width} {height}"'
    size += ' style="max-width:none"'  # a wide tree scrolls: its words stay as large as the page's
    caption = f"{name}: the tree of one round; in green what stood."
    svg = f'<svg xmlns="http://www.w3.org/2000/svg" {size}>{"".join(marks)}</svg>'
    return figure(svg, caption)


def _leaves_first(children: dict[int, list[int]]) -> list[int]:
    """Return all nodes below the root and itself, children before their parent."""
    order, stack = [], [0]
    while stack:
        node = stack.pop()
        order.append(node)
        stack += children.get(node, [])
    return order[::-1]
