"""The frame of a page of HTML that needs nothing beside itself, and plots drawn into it."""

from __future__ import annotations

import html
import io
from collections.abc import Callable, Sequence
from typing import Any

from eagle_train.errors import UserError

_STYLE = """body{font:15px/1.5 system-ui,sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem;
color:#222;background:#fff;overflow-wrap:anywhere}
table{border-collapse:collapse;margin:1rem 0;display:block;overflow-x:auto;overflow-wrap:normal}
td,th{padding:.3rem .8rem;border-bottom:1px solid #ddd;text-align:left}
svg{max-width:100%;height:auto}figure{margin:1.5rem 0;overflow-x:auto}figcaption{color:#555}
pre{background:#f6f6f6;padding:1rem;overflow-x:auto}"""


def check_matplotlib(what: str) -> None:
    """Raise UserError, beginning with `what`, where nothing can be drawn."""
    try:
        import matplotlib as _  # noqa: F401
    except ImportError as error:
        raise UserError(f"{what}: matplotlib is not installed; pip install matplotlib") from error


def as_html(title: str, parts: Sequence[str]) -> str:
    """Return the whole page around its parts."""
    body = "\n".join(parts)
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta name="viewport" content="width=device-width"><title>{as_text(title)}</title>'
        f"<style>{_STYLE}</style></head>\n<body>\n{body}\n</body></html>\n"
    )


def as_text(value: Any) -> str:
    """Return a value's text as HTML."""
    return html.escape(str(value))


def figure(svg: str, caption: str) -> str:
    """Return a picture with its caption."""
    return f"<figure>{svg}<figcaption>{as_text(caption)}</figcaption></figure>"


def plot(caption: str, draw: Callable[[Any, Any], None], data: Any, name: str) -> str:
    """Return what `draw` makes of empty axes and `data`, as inline SVG; each on a page has its own `name`."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    canvas = Figure(figsize=(8, 3.2), layout="constrained")
    axes = canvas.subplots()
    draw(axes, data)
    axes.spines[["top", "right"]].set_visible(False)
    if axes.get_legend_handles_labels()[1]:  # above the axes, where no line runs
        canvas.legend(frameon=False, fontsize=8, loc="outside upper left", ncols=2)
    picture = io.StringIO()
    with rc_context({"svg.hashsalt": name, "svg.fonttype": "none"}):  # ids follow from the name
        canvas.savefig(picture, format="svg", metadata={"Date": None})
    svg = picture.getvalue()
    return figure(svg[svg.index("<svg") :], caption)
