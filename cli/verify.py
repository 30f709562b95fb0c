"""``eagle verify``: parse, then one call."""

from __future__ import annotations

import json
import shlex

import typer

from . import options

NAME = "verify"
HELP = "Show that a head leaves the output unchanged: fp32 token for token, bf16 difference by difference."
EXAMPLES = """
**Examples**

    eagle verify run/ --target HuggingFaceTB/SmolLM2-135M-Instruct

    eagle verify head/ --target ./my-model --questions my_prompts.jsonl --num-questions 100

    eagle verify run/ --target ./my-model --dtype fp32 --draft chain --gamma 5 --json
"""


def run(
    head: options.Head,
    target: options.Target,
    questions: options.Questions = None,
    num_questions: int = typer.Option(20, "--num-questions", help="So many, evenly spread over the set."),
    max_turns: int | None = typer.Option(None, "--max-turns", min=1, help="Only so many turns of each."),
    draft: list[str] | None = typer.Option(
        None,
        "--draft",
        help=f"chain, static, dynamic, sampled or {options.TUNED}; repeat it. Default a chain and the "
        "head's usual tree.",
    ),
    gamma: options.Gamma = None,
    tree_tokens: options.TreeTokens = None,
    top_k: options.TopK = None,
    depth: options.Depth = None,
    max_new_tokens: int = typer.Option(64, "--max-new-tokens", help="Tokens of each answer at most."),
    dtype: list[str] | None = typer.Option(None, "--dtype", help="fp32 and bf16 by default; repeat it."),
    chat_template: options.ChatTemplate = None,
    no_processors: options.NoProcessors = False,
    trust_remote_code: options.TrustRemoteCode = False,
    as_json: options.AsJson = False,
) -> int:
    from eagle_train.evaluation.assurance import DTYPES, fault, lines, verify_head

    report = verify_head(
        head,
        target,
        questions,
        options.draft_shapes(draft or [], gamma, tree_tokens, top_k, depth) or None,
        num_questions=num_questions,
        max_turns=max_turns,
        max_new_tokens=max_new_tokens,
        dtypes=dtype or DTYPES,
        chat_template=chat_template,
        processors=not no_processors,
        trust_remote_code=trust_remote_code,
    )
    if as_json:
        print(json.dumps(report, indent=2, ensure_ascii=False))
    else:
        print("\n".join(lines(report)))
        if not report["unexplained"]:
            print("every answer is the target's own, up to rounding where said")
            print(f"next: eagle tune {shlex.quote(head)} --target {shlex.quote(target)}")
    return options.fail_on(fault(report))
