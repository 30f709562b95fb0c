"""``eagle demo``: parse, one call, and a table."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import typer

from . import options

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
    as_json: options.AsJson = False,
) -> int:
    from eagle_train.demo import demo
    from eagle_train.evaluation.report import fault

    report = demo(out)
    if as_json:
        print(json.dumps(report, indent=2, ensure_ascii=False))
    else:
        _show(report, out)
    return options.fail_on(fault(report["evaluation"]))


def kept(out: Path, **_: Any) -> str:
    """Say what an interrupted demo leaves."""
    made = (out / "rows" / "rows.json").is_file()
    return "finished stages are kept" if made else "no stage was finished yet"


def _show(report: dict[str, Any], out: Path) -> None:
    from rich.console import Console

    from eagle_train.evaluation.report import draft_name

    console = Console(highlight=False, soft_wrap=True)
    console.print()
    console.print(_table(report))
    for result in report["evaluation"]["results"]:
        print(_why(result, draft_name(result["tree"])))
    seconds = ", ".join(f"{name} {value:.0f}" for name, value in report["seconds"].items())
    print(f"Seconds: {seconds}. Largest process {report['peak_memory_gib']:.1f} GiB.\n")
    for name, what in (
        ("rows", "token rows with their loss mask"),
        ("shards", "the target's features"),
        ("run", "checkpoints, metrics.jsonl"),
        ("head", "what vLLM and SGLang load"),
        ("demo.json", "all figures"),
    ):
        print(f"  {out / name}  {what}")
    names = f"{shlex.quote(str(out / 'head'))} --target {shlex.quote(report['target'])}"
    print(
        f"""
Try it:         eagle generate {names} --draft chain --prompt "Why is the sea salt?"
Your own model: eagle prepare chats.jsonl --target YOUR_MODEL --out rows/
                eagle extract rows/ --target YOUR_MODEL --for eagle3 --out shards/
                eagle train shards/ --recipe eagle3 --out run/
                {options.eval_command("run/", "YOUR_MODEL")}
                eagle export run/ --engine vllm --out head/"""
    )


def _table(report: dict[str, Any]) -> Any:
    from rich.table import Table

    evaluation = report["evaluation"]
    prompts = evaluation["prompts"]
    table = Table(
        title=f"EAGLE-3 head on SmolLM2-135M-Instruct, {prompts} prompts, greedy, float32",
        caption="tau: acceptance length; * predicted without decoding",
    )
    for column in ("", "tau", "tokens/s", "times plain", "unchanged"):
        table.add_column(column, justify="left" if column == "" else "right", no_wrap=True)
    plain = evaluation["plain"]["tokens_per_second"]
    table.add_row("plain decoding", "", f"{plain:.1f}", "1.00", "")
    table.add_row("untrained, chain of 3*", f"{report['untrained_tau']:.2f}", "", "", "")
    for result in evaluation["results"]:
        tree = result["tree"]
        shape = f"chain of {tree['depth']}" if tree["draft"] == "chain" else f"tree of {tree['nodes']} nodes"
        table.add_row(
            f"trained, {shape}",
            f"{result['tau']:.2f}",
            f"{result['tokens_per_second']:.1f}",
            f"{result['speedup']:.2f}",
            f"{prompts - len(result['differences'])} of {prompts}",
        )
    return table


def _why(result: dict[str, Any], name: str) -> str:
    """Say what decides the speed: tokens a round gives against what a round costs."""
    verdict = "faster" if result["speedup"] >= 1 else "slower"
    return (
        f"{name}: a round gives {result['tau']:.2f} tokens and takes {result['round_cost']:.2f} times as "
        f"long as a plain token, hence {verdict}."
    )
