"""``eagle demo``: parse, one call, and a table."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import typer

NAME = "demo"
HELP = "Run the whole chain on the built-in small case."
EXAMPLES = """
**Examples**

    eagle demo

    eagle demo --out trial/

    eagle demo --json
"""


def run(
    out: Path = typer.Option(Path("eagle-demo"), "--out", help="Folder for everything the demo makes."),
    as_json: bool = typer.Option(False, "--json", help="Print the figures as JSON."),
) -> None:
    from eagle_train.demo import demo

    report = demo(out)
    if as_json:
        print(json.dumps(report))
    else:
        _show(report, out)


def _show(report: dict[str, Any], out: Path) -> None:
    from rich.console import Console
    from rich.table import Table

    from eagle_train.evaluation.report import draft_name

    evaluation = report["evaluation"]
    plain = evaluation["plain"]["tokens_per_second"]
    table = Table(title="EAGLE-3 head on SmolLM2-135M-Instruct, greedy, float32")
    for column in ("", "acceptance length", "tokens/s", "times plain", "output unchanged"):
        table.add_column(column, justify="left" if column == "" else "right")
    table.add_row("plain decoding", "", f"{plain:.1f}", "1.00", "")
    table.add_row("untrained head, chain of 3 (predicted)", f"{report['untrained_tau']:.2f}", "", "", "")
    for result in evaluation["results"]:
        same = evaluation["prompts"] - len(result["differences"])
        table.add_row(
            f"trained head, {draft_name(result['tree'])}",
            f"{result['tau']:.2f}",
            f"{result['tokens_per_second']:.1f}",
            f"{result['speedup']:.2f}",
            f"{same} of {evaluation['prompts']} prompts",
        )
    console = Console()
    console.print()
    console.print(table)
    for result in evaluation["results"]:
        console.print(_why(result, draft_name(result["tree"])), highlight=False)
    seconds = ", ".join(f"{name} {value:.0f}" for name, value in report["seconds"].items())
    console.print(
        f"Seconds: {seconds}. Largest process {report['peak_memory_gib']:.1f} GiB.", highlight=False
    )
    for name, what in (
        ("rows", "token rows with their loss mask"),
        ("shards", "the target's features"),
        ("run", "checkpoints, metrics.jsonl"),
        ("head", "what vLLM and SGLang load"),
        ("demo.json", "all figures"),
    ):
        console.print(f"  {out / name}  [dim]{what}[/dim]", highlight=False)
    console.print(
        f"""
Try it:         eagle generate {out / "head"} --target {report["target"]} --prompt "Why is the sea salt?"
Your own model: eagle prepare chats.jsonl --target YOUR_MODEL --out rows/
                eagle extract rows/ --target YOUR_MODEL --for eagle3 --out shards/
                eagle train shards/ --recipe eagle3 --out run/
                eagle eval run/ --target YOUR_MODEL
                eagle export run/ --engine vllm --out head/""",
        highlight=False,
        markup=False,
        soft_wrap=True,
    )


def _why(result: dict[str, Any], name: str) -> str:
    """Say what decides the speed: tokens a round gives against what a round costs."""
    verdict = "faster" if result["speedup"] >= 1 else "slower"
    return (
        f"{name}: a round gives {result['tau']:.2f} tokens and takes {result['round_cost']:.2f} times as "
        f"long as a plain token, hence {verdict}."
    )
