"""``eagle eval``: parse, then one call."""

from __future__ import annotations

import json
import shlex

import typer

from . import options

NAME = "eval"
HELP = "Decode with a head: acceptance length, speed-up, losslessness."
EXAMPLES = """
**Examples**

    eagle eval run/ --target HuggingFaceTB/SmolLM2-135M-Instruct

    eagle eval head/ --target ./my-model --questions mt_bench.jsonl --draft chain --draft dynamic --json

    eagle eval run/ --predict shards/ --gamma 5
"""


def run(
    head: options.Head,
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
        "for an eagle1 head, dynamic for eagle3; on a CPU a chain is faster.",
    ),
    gamma: options.Gamma = None,
    tree_tokens: options.TreeTokens = None,
    top_k: options.TopK = None,
    depth: options.Depth = None,
    temperature: options.Temperature = 0.0,
    top_p: options.TopP = 1.0,
    top_k_sampling: options.TopKSampling = 0,
    max_new_tokens: int = typer.Option(128, "--max-new-tokens", help="Tokens of each answer at most."),
    dtype: options.Dtype = "auto",
    chat_template: options.ChatTemplate = None,
    predict: str | None = typer.Option(
        None,
        "--predict",
        metavar="TEXTS",
        help="No decoding: a greedy chain's acceptance from shards, or from a file of the target's answers.",
    ),
    seed: options.Seed = 0,
    device_map: str | None = typer.Option(
        None, "--device-map", help="auto spreads a target over all devices that it needs."
    ),
    trust_remote_code: options.TrustRemoteCode = False,
    as_json: bool = typer.Option(False, "--json", help="Print the figures as JSON."),
) -> int:
    from eagle_train.errors import UserError

    if predict is not None:
        decoding = {
            "--questions": questions,
            "--num-questions": num_questions,
            "--max-turns": max_turns,
            "--draft": [name for name in draft or [] if name != "chain"],
            "--tree-tokens": tree_tokens,
            "--top-k": top_k,
            "--depth": depth,
            "--temperature": temperature,
            "--device-map": device_map,
        }
        if idle := [option for option, value in decoding.items() if value]:
            raise UserError(
                f"eagle eval: --predict decodes nothing, so {idle[0]} has no meaning; drop one of the two"
            )
        return _predict(head, predict, target, gamma, dtype, chat_template, trust_remote_code, as_json)

    from eagle_train.decoding.sampling import Sampling
    from eagle_train.evaluation.evaluate import evaluate
    from eagle_train.evaluation.report import fault, lines

    if target is None:
        raise UserError("eagle eval: no --target; give the model that the head was trained for")
    report = evaluate(
        head,
        target,
        questions,
        options.draft_shapes(draft or [], gamma, tree_tokens, top_k, depth),
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
    return options.fail_on(fault(report))


def _predict(
    head: str,
    texts: str,
    target: str | None,
    gamma: int | None,
    dtype: str,
    chat_template: str | None,
    trust_remote_code: bool,
    as_json: bool,
) -> int:
    from eagle_train.evaluation.predict import predict
    from eagle_train.evaluation.report import predicted_lines

    gamma = 3 if gamma is None else gamma
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
