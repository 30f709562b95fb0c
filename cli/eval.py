"""``eagle eval``: parse, then one call."""

from __future__ import annotations

import json
import shlex
import sys
from typing import Any

import typer

NAME = "eval"
HELP = "Decode with a head: acceptance length, speed-up, losslessness."
EXAMPLES = """
**Examples**

    eagle eval run/ --target HuggingFaceTB/SmolLM2-135M-Instruct

    eagle eval head/ --target ./my-model --questions mt_bench.jsonl --draft chain --draft dynamic --json

    eagle eval run/ --predict shards/ --gamma 5
"""


def run(
    head: str = typer.Argument(
        ..., metavar="HEAD", help="A run of eagle train (its best), a head directory or a hub id."
    ),
    target: str | None = typer.Option(
        None,
        "--target",
        help="The target: hub id, directory or .gguf file. Not needed to predict from shards.",
    ),
    questions: str | None = typer.Option(
        None, "--questions", help="JSON lines in MT-bench form; default the built-in 60 held-out questions."
    ),
    num_questions: int | None = typer.Option(
        None, "--num-questions", help="Only so many questions, evenly spread over the file."
    ),
    max_turns: int | None = typer.Option(
        None, "--max-turns", min=1, help="Ask only so many turns of each question."
    ),
    draft: list[str] | None = typer.Option(
        None,
        "--draft",
        help="chain, static (EAGLE-1's tree) or dynamic (EAGLE-2's); repeat it to compare. Default static "
        "for an eagle1 head, dynamic for eagle3.",
    ),
    gamma: int = typer.Option(3, "--gamma", max=256, help="Guesses of a chain."),
    tree_tokens: int = typer.Option(
        60, "--tree-tokens", max=4096, help="Nodes of a dynamic tree with its root."
    ),
    top_k: int = typer.Option(10, "--top-k", max=1024, help="Beams of a dynamic tree, and children of each."),
    depth: int = typer.Option(8, "--depth", max=256, help="Levels of guesses of a dynamic tree."),
    temperature: float = typer.Option(0.0, "--temperature", help="0 is greedy."),
    top_p: float = typer.Option(
        1.0, "--top-p", help="Sample from the smallest set with this much probability."
    ),
    top_k_sampling: int = typer.Option(
        0, "--top-k-sampling", help="Sample from so many best tokens; 0 is all."
    ),
    max_new_tokens: int = typer.Option(128, "--max-new-tokens", help="Tokens of each answer at most."),
    dtype: str = typer.Option("auto", "--dtype", help="fp32, bf16, fp16, or auto: the checkpoint's own."),
    chat_template: str | None = typer.Option(
        None, "--chat-template", help="A Jinja file, or vicuna, or llama-2; default the tokenizer's own."
    ),
    predict: str | None = typer.Option(
        None,
        "--predict",
        metavar="TEXTS",
        help="No decoding: a chain's acceptance from shards, or from a file of the target's answers.",
    ),
    seed: int = typer.Option(0, "--seed", min=0, max=2**63 - 1, help="Seed of the draws when sampling."),
    device_map: str | None = typer.Option(
        None, "--device-map", help="auto spreads a target over all devices that it needs."
    ),
    trust_remote_code: bool = typer.Option(
        False, "--trust-remote-code", help="Run code that the target brings along."
    ),
    as_json: bool = typer.Option(False, "--json", help="Print the figures as JSON."),
) -> int:
    if predict is not None:
        return _predict(head, predict, target, gamma, dtype, chat_template, trust_remote_code, as_json)

    from eagle_train.decoding.sampling import Sampling
    from eagle_train.errors import UserError
    from eagle_train.evaluation.evaluate import evaluate, parse_shape, refuse_idle_sizes
    from eagle_train.evaluation.report import lines, warn_in_one_line

    warn_in_one_line()
    if target is None:
        raise UserError("eagle eval: no --target; give the model that the head was trained for")
    sizes = {"gamma": gamma, "tree_tokens": tree_tokens, "top_k": top_k, "depth": depth}
    if not draft:
        refuse_idle_sizes(sizes)
    report = evaluate(
        head,
        target,
        questions,
        [parse_shape(name, **sizes) for name in draft] if draft else None,
        sampling=Sampling(temperature, top_k_sampling, top_p),
        max_new_tokens=max_new_tokens,
        num_questions=num_questions,
        max_turns=max_turns,
        dtype=dtype,
        chat_template=chat_template,
        trust_remote_code=trust_remote_code,
        device_map=device_map,
        seed=seed,
    )
    if as_json:
        print(json.dumps(report, indent=2, ensure_ascii=False))
    else:
        print("\n".join(lines(report)))
        print(f"\nnext: eagle export {shlex.quote(head)} --engine vllm --out served/")
    return _verdict(report)


def _verdict(report: dict[str, Any]) -> int:
    """A differing greedy answer is explained by rounding in half precision; in fp32 it is a fault."""
    if report["dtype"] != "fp32" or all(result["lossless"] is not False for result in report["results"]):
        return 0
    print(
        "error: greedy answers differ from plain decoding in fp32 (see above); near-ties apart (a gap below "
        "1e-3), this is a fault in the toolkit: please report it",
        file=sys.stderr,
    )
    return 1


def _predict(
    head: str,
    texts: str,
    target: str | None,
    gamma: int,
    dtype: str,
    chat_template: str | None,
    trust_remote_code: bool,
    as_json: bool,
) -> int:
    from eagle_train.evaluation.predict import predict
    from eagle_train.evaluation.report import predicted_lines

    report = predict(
        head,
        texts,
        target,
        gamma=gamma,
        dtype=dtype,
        chat_template=chat_template,
        trust_remote_code=trust_remote_code,
    )
    if as_json:
        print(json.dumps(report, indent=2, ensure_ascii=False))
    else:
        print("\n".join(predicted_lines(report)))
        names = f"{shlex.quote(head)} --target {shlex.quote(report['target'])}"
        print(f"next: eagle eval {names} --draft chain --gamma {gamma}")
    return 0
