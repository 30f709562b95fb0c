"""Is a head's output the target's own? Every answer compared in fp32, every difference in bf16 explained."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from eagle_train.decoding.shapes import Chain, Shape
from eagle_train.evaluation.evaluate import evaluate
from eagle_train.evaluation.heads import open_head
from eagle_train.evaluation.methods import Method, usual_shape
from eagle_train.evaluation.questions import read_questions
from eagle_train.evaluation.report import NEAR_TIE, draft_name, own_names
from eagle_train.progress import counted
from eagle_train.targets.load import load_target

DTYPES = ("fp32", "bf16")
_TIMES_NOISE = 4  # a tree is read in yet another order than the two whose difference is the noise
_ROUNDING = 2.0**-7  # bf16 keeps 8 bits of a logit


def verify_head(
    head: str | Path,
    target: str,
    questions: str | Path | None = None,
    drafts: Sequence[Shape] | None = None,
    *,
    methods: Sequence[Method] = (),
    num_questions: int | None = 20,
    dtypes: Sequence[str] = DTYPES,
    **settings: Any,
) -> dict[str, Any]:
    """Answer the questions greedily with plain decoding and with the head, in each of `dtypes`.

    `drafts` None means a chain of 3 and the head's usual tree. Other settings are those of `evaluate`.
    Returns ``checks``, one dict per dtype and draft (prompts, tokens, ``differences``), and ``unexplained``:
    the differences beyond what the order of summation does. In fp32 that are all but near-ties of the
    target's two best logits; in half precision those where a token that was written lies further below the
    best than the logits there move when the same text is read in other pieces. Raises UserError as
    `evaluate`.
    """
    some = read_questions(questions, num_questions)
    checks, unexplained, own = [], [], {}  # type: tuple[list[Any], list[Any], dict[str, Any]]
    for dtype in dtypes:
        model = load_target(target, dtype=dtype, trust_remote_code=settings.get("trust_remote_code", False))
        shapes = list(drafts or [Chain(3), usual_shape(open_head(head, model))])
        report = evaluate(head, model, some, shapes, methods=methods, command="verify", **settings)
        own = report["processors"]
        for result in report["results"]:
            found = [{**one, "explained": explained(one, dtype)} for one in result["differences"]]
            name = f"{result['method']}, {draft_name(result['tree'])}"
            checks.append(
                {
                    "dtype": dtype,
                    "draft": name,
                    "prompts": report["prompts"],
                    "tokens": report["plain"]["tokens"],
                    "tau": result["tau"],
                    "differences": found,
                }
            )
            unexplained += [{"dtype": dtype, "draft": name, **one} for one in found if not one["explained"]]
    return {
        "head": str(head),
        "target": target,
        "processors": own,
        "checks": checks,
        "unexplained": unexplained,
    }


def explained(difference: dict[str, Any], dtype: str) -> bool:
    """True where rounding alone can have made the other token the best."""
    if dtype == "fp32":
        return bool(difference["below"] < NEAR_TIE)
    bound = _TIMES_NOISE * difference["noise"] + _ROUNDING * abs(difference["best"])
    return bool(difference["below"] <= bound)


def lines(report: dict[str, Any]) -> list[str]:
    """Return the report as lines of text."""
    found = [f"{report['head']} on {report['target']}, greedy{own_names(report)}, against plain decoding"]
    for check in report["checks"]:
        start = f"{check['dtype']}, {check['draft']} (tau {check['tau']:.2f}): "
        differences = check["differences"]
        equal = f"{check['prompts'] - len(differences)} of {counted(check['prompts'], 'answer')} equal"
        found.append(f"{start}{equal}, {counted(check['tokens'], 'token')}")
        for one in differences:
            found.append(
                f"  {one['question']}, turn {one['turn']}, token {one['at']}: the two best logits are "
                f"{one['gap']:.2g} apart, reading in other pieces moves them by {one['noise']:.2g}"
                f"{'' if one['explained'] else ': NOT explained by rounding'}"
            )
    return found


def fault(report: dict[str, Any]) -> str | None:
    """Return a sentence where something differs beyond rounding, else None."""
    if not report["unexplained"]:
        return None
    first, count = report["unexplained"][0], len(report["unexplained"])
    return (
        f"{counted(count, 'answer')} differ{'s' if count == 1 else ''} from plain decoding beyond "
        f"rounding; first in "
        f"{first['dtype']}, {first['draft']}: {first['question']}, turn {first['turn']}, token "
        f"{first['at']}, {first['below']:.2g} below the best logit; please report it"
    )
