"""What ``eagle eval`` prints and writes: figures, and what to type next."""

from __future__ import annotations

import json
import shlex
from typing import Any

from . import options

_LEARNED = 1.05  # acceptance length; below, fewer than one round in twenty keeps a guess


def say_compared(reports: list[dict[str, Any]], files: list[str], head: str | None, as_json: bool) -> int:
    """Print the reports and write them into `files`; return the exit code."""
    from eagle_train.evaluation.grid import write_reports
    from eagle_train.evaluation.report import fault, lines
    from eagle_train.evaluation.tables import as_lines

    if as_json:
        print(
            json.dumps(
                reports[0] if len(reports) == 1 else {"reports": reports}, indent=2, ensure_ascii=False
            )
        )
    else:
        for one in reports:
            print("\n".join([*lines(one), ""]))
        if len(reports) > 1 or len(reports[0]["results"]) > 1:
            print("\n".join(["tau, times plain decoding", *as_lines(reports), ""]))
    write_reports(files, reports)  # after what stands on the screen, which is then not lost
    if not as_json:
        if files:
            print(f"written: {', '.join(files)}")
        if head is not None:
            print(following(reports, head))
    faults = [found for found in map(fault, reports) if found]
    return options.fail_on(faults[0] if faults else None)


def following(reports: list[dict[str, Any]], head: str) -> str:
    """Return the line on what to do next with `head`, by its best acceptance length."""
    from eagle_train.evaluation.methods import HEAD_KINDS

    taus = [one["tau"] for report in reports for one in report["results"] if one["method"] in HEAD_KINDS]
    if max(taus, default=_LEARNED) < _LEARNED:
        return (
            f"tau below {_LEARNED}: hardly a guess is right; train longer, on more answers that the target "
            "itself wrote (eagle regenerate)"
        )
    return f"next: eagle export {shlex.quote(head)} --engine vllm --out served/"


def say_predicted(
    report: dict[str, Any], files: list[str], as_json: bool, name: str, has_processors: bool
) -> None:
    """Print the report of `predict` and write it into `files`; `name` is that of the draft as typed."""
    from eagle_train.evaluation.grid import write_reports
    from eagle_train.evaluation.report import predicted_lines

    write_reports(files, [report])
    if as_json:
        print(json.dumps(report, indent=2, ensure_ascii=False))
        return
    print("\n".join(predicted_lines(report)))
    if files:
        print(f"written: {', '.join(files)}")
    tree = report["tree"]
    same = ["--draft", name, *(["--gamma", str(tree["depth"])] if name == "chain" else [])]
    if name == "dynamic":
        sizes = {"--tree-tokens": tree["nodes"], "--top-k": tree["top_k"], "--depth": tree["depth"]}
        same += [word for option, size in sizes.items() for word in (option, str(size))]
    same += ["--temperature", f"{report['temperature']:g}"] if report["temperature"] else []
    same += [] if has_processors else ["--no-processors"]
    print(f"next: {options.eval_command(report['head'], report['target'], same)}")
