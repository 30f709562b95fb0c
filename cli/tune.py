"""``eagle tune``: parse, then one call."""

from __future__ import annotations

import json
from typing import Any

import typer

from . import options

NAME = "tune"
HELP = "Find the draft that is fastest on this machine, and say plainly where speculation loses."
EXAMPLES = """
**Examples**

    eagle tune run/ --target HuggingFaceTB/SmolLM2-135M-Instruct --out tuned.json

    eagle tune head/ --target ./my-model --questions my_prompts.jsonl --temperature 1

    eagle tune run/ --target ./my-model --dtype bf16 --num-questions 30 --json
"""


def run(
    head: options.Head,
    target: options.Target,
    questions: options.Questions = None,
    num_questions: int = typer.Option(
        16,
        "--num-questions",
        min=2,
        help="Half of them to learn acceptance from, half to measure the speed on.",
    ),
    max_new_tokens: int = typer.Option(64, "--max-new-tokens", min=2, help="Tokens of each answer at most."),
    temperature: options.Temperature = 0.0,
    top_p: options.TopP = 1.0,
    top_k_sampling: options.TopKSampling = 0,
    dtype: options.Dtype = "auto",
    chat_template: options.ChatTemplate = None,
    seed: options.Seed = 0,
    no_processors: options.NoProcessors = False,
    trust_remote_code: options.TrustRemoteCode = False,
    out: str | None = typer.Option(
        None,
        "--out",
        metavar="FILE.json",
        help="Write the draft found, for --draft FILE.json: a new file, or over an earlier draft.",
    ),
    as_json: options.AsJson = False,
) -> int:
    from eagle_train.decoding.sampling import Sampling
    from eagle_train.evaluation.tuning import lines, tune

    report = tune(
        head,
        target,
        questions,
        num_questions=num_questions,
        max_new_tokens=max_new_tokens,
        sampling=Sampling(temperature, top_k_sampling, top_p),
        dtype=dtype,
        chat_template=chat_template,
        seed=seed,
        processors=not no_processors,
        trust_remote_code=trust_remote_code,
        out=out,
    )
    if as_json:
        print(json.dumps(report, indent=2, ensure_ascii=False))
        return 0
    print("\n".join(lines(report)))
    if out is not None:
        print(f"written: {out}")
        same = ["--draft", out, *(["--no-processors"] if no_processors else [])]
        print(f"next: {options.eval_command(head, target, same)}")
    else:
        print(f"next: {_following(report)}")
    return 0


def _following(report: dict[str, Any]) -> str:
    """Return what to do next where no draft was written."""
    from eagle_train.evaluation.tuning import too_few

    if too_few(report):
        return "the same with more to learn from: a larger --num-questions or --max-new-tokens"
    if not report["wins"]:
        return "train longer, on more answers that the target itself wrote (eagle regenerate)"
    return "the same with --out tuned.json, which eagle eval and generate take as --draft"
