"""``eagle eval``: parse, then one call."""

from __future__ import annotations

import json
from typing import Any

import typer

from . import options
from .eval_output import say_compared, say_predicted

NAME = "eval"
HELP = "Decode with a head, or by other methods: acceptance length, speed-up, losslessness."
EXAMPLES = """
**Examples**

    eagle eval run/ --target HuggingFaceTB/SmolLM2-135M-Instruct

    eagle eval run/ --target ./my-model --method prompt-lookup --method draft-model=small/ --report table.html

    eagle eval run/ --predict shards/ --gamma 5
"""

# What each mode reads; any other option given with it would be ignored, so it is refused.
_ALWAYS = {"head", "target", "dtype", "chat_template", "trust_remote_code", "as_json"}
_READ = {
    "--predict": _ALWAYS
    | {"predict", "draft", "gamma", "temperature", "top_p", "top_k_sampling", "other_target", "report"}
    | {"no_processors", "tree_tokens", "top_k", "depth"},
    "--against-server": _ALWAYS | {"against_server", "questions", "num_questions", "max_new_tokens"},
}
_WHY = {
    "--predict": "--predict decodes nothing",
    "--against-server": "--against-server drafts greedily, as the server does",
}


def run(
    context: typer.Context,
    head: str | None = typer.Argument(
        None,
        metavar="[HEAD]",
        help="A run of eagle train (its best), a head directory or a hub id. Not needed with --method.",
    ),
    target: str | None = typer.Option(
        None,
        "--target",
        help="The target: hub id, directory or .gguf file. Not needed to predict from shards.",
    ),
    method: list[str] | None = typer.Option(
        None,
        "--method",
        metavar="NAME[=DIR]",
        help="plain, draft-model=DIR (or =first:6, the target's own layers), prompt-lookup, lookahead; "
        "medusa, eagle1, eagle2, eagle3 (=DIR, or HEAD's). Repeat it to compare.",
    ),
    questions: options.ManyQuestions = None,
    num_questions: int | None = typer.Option(
        None, "--num-questions", help="Only so many questions, evenly spread over the file."
    ),
    max_turns: int | None = typer.Option(
        None, "--max-turns", min=1, help="Ask only so many turns of each question."
    ),
    draft: list[str] | None = typer.Option(
        None,
        "--draft",
        help=f"chain, static (EAGLE-1's tree), dynamic (EAGLE-2's), sampled, or {options.TUNED}. Repeat it "
        "to compare. Default static for an eagle1 head, dynamic for eagle3; on a CPU a chain is faster.",
    ),
    gamma: options.Gamma = None,
    tree_tokens: options.TreeTokens = None,
    top_k: options.TopK = None,
    depth: options.Depth = None,
    window: int | None = typer.Option(None, "--window", max=256, help="Columns of lookahead; default 7."),
    level: int | None = typer.Option(None, "--level", max=64, help="Tokens of its n-grams; default 4."),
    guesses: int | None = typer.Option(None, "--guesses", max=256, help="n-grams it verifies; default 7."),
    temperature: list[float] | None = typer.Option(
        None, "--temperature", help="0 (the default) is greedy; repeat it for a table."
    ),
    top_p: options.TopP = 1.0,
    top_k_sampling: options.TopKSampling = 0,
    repetition_penalty: options.RepetitionPenalty = 1.0,
    no_processors: options.NoProcessors = False,
    block: bool = typer.Option(
        False, "--block", help="Accept chains of samples as a whole (block verification)."
    ),
    max_new_tokens: int = typer.Option(128, "--max-new-tokens", help="Tokens of each answer at most."),
    batch: int = typer.Option(
        1,
        "--batch",
        min=1,
        max=256,
        help="Decode so many prompts at once; speeds are then the whole batch's, plain decoding's too.",
    ),
    dtype: options.Dtype = "auto",
    chat_template: options.ChatTemplate = None,
    predict: str | None = typer.Option(
        None,
        "--predict",
        metavar="TEXTS",
        help="No decoding: the acceptance of a chain or a tree from shards, or from conversations as for "
        "eagle prepare with the target's answers (written at --temperature), also by category where records "
        "have one.",
    ),
    other_target: bool = typer.Option(
        False, "--other-target", help="Predict although the head was trained on other weights of the target."
    ),
    against_server: str | None = typer.Option(
        None,
        "--against-server",
        metavar="URL",
        help="Ask a running vLLM or SGLang server the first turns greedily; compare its texts and counters "
        "with those of our loop, which drafts as the server does, both without the target's own processors. "
        "Exit code 1 where anything differs.",
    ),
    seed: options.Seed = 0,
    device_map: options.DeviceMap = None,
    trust_remote_code: options.TrustRemoteCode = False,
    report: list[str] | None = typer.Option(
        None,
        "--report",
        metavar="FILE",
        help="Write the figures as .html (with plots), .csv or .json, a new file or over an earlier report; "
        "repeat it.",
    ),
    as_json: options.AsJson = False,
) -> int:
    from eagle_train.errors import UserError

    temperatures = temperature or [0.0]
    mode = "--predict" if predict is not None else "--against-server" if against_server is not None else None
    if mode is not None:
        names = {str(parameter.name) for parameter in context.command.params}
        options.refuse_unread(context, names - _READ[mode], _WHY[mode])
    if other_target and mode is None:
        raise UserError("eagle eval: --other-target is for --predict; drop it, decoding warns by itself")
    if predict is not None:
        from eagle_train.decoding.sampling import Sampling

        for option, values in (("--draft", draft or []), ("--temperature", temperatures)):
            if len(values) > 1:
                raise UserError(
                    f"eagle eval: --predict takes one {option}, got {len(values)}; drop the others"
                )
        if head is None:
            raise UserError("eagle eval: --predict needs HEAD; give a run or a head directory")
        shapes = options.draft_shapes(draft or [], gamma, tree_tokens, top_k, depth)
        shapes = shapes or options.draft_shapes(["chain"], None, None, None, None)
        return _predict(
            head,
            predict,
            target,
            (draft or ["chain"])[0],
            report or [],
            as_json,
            draft=shapes[0],
            sampling=Sampling(temperatures[0], top_k_sampling, top_p),
            dtype=dtype,
            chat_template=chat_template,
            trust_remote_code=trust_remote_code,
            other_target=other_target,
            processors=not no_processors,
        )
    if target is None:
        raise UserError("eagle eval: no --target; give the model that the head was trained for")
    if against_server is not None:
        if head is None or len(questions or []) > 1:
            raise UserError("eagle eval: --against-server needs HEAD, and one --questions at most")
        return _against_server(
            head,
            target,
            against_server,
            as_json,
            questions=questions[0] if questions else None,
            max_new_tokens=max_new_tokens,
            num_questions=num_questions,
            dtype=dtype,
            chat_template=chat_template,
            trust_remote_code=trust_remote_code,
        )

    from eagle_train.decoding.sampling import Sampling
    from eagle_train.evaluation.grid import check_reports, evaluate_grid
    from eagle_train.evaluation.methods import HEAD_KINDS, Method, Sizes

    methods = [Method.parse(text, head) for text in method or []]
    named = any(one.name in HEAD_KINDS and one.source == head for one in methods)  # HEAD has its method
    chains = not any(one.name in ("draft-model", "prompt-lookup") for one in methods) or "chain" in (
        draft or []
    )
    lookahead = any(one.name == "lookahead" for one in methods)
    for option, value in (("window", window), ("level", level), ("guesses", guesses)):
        if value is not None and not lookahead:
            raise UserError(f"--{option} {value}: a size of lookahead; give --method lookahead with it")
    check_reports(report or [])
    reports = evaluate_grid(
        None if named else head,
        target,
        questions or [],
        temperatures,
        drafts=options.draft_shapes(draft or [], gamma if chains else None, tree_tokens, top_k, depth)
        or None,
        methods=methods,
        sizes=Sizes(gamma, window, level, guesses),
        sampling=Sampling(0.0, top_k_sampling, top_p, repetition_penalty),
        block=block,
        processors=not no_processors,
        max_new_tokens=max_new_tokens,
        num_questions=num_questions,
        max_turns=max_turns,
        batch=batch,
        dtype=dtype,
        chat_template=chat_template,
        trust_remote_code=trust_remote_code,
        device_map=device_map,
        seed=seed,
    )
    return say_compared(reports, report or [], head, as_json)


def _predict(
    head: str, texts: str, target: str | None, name: str, files: list[str], as_json: bool, **given: Any
) -> int:
    from eagle_train.evaluation.grid import check_reports
    from eagle_train.evaluation.predict import predict

    check_reports(files)
    say_predicted(predict(head, texts, target, **given), files, as_json, name, given["processors"])
    return 0


def _against_server(head: str, target: str, url: str, as_json: bool, **given: Any) -> int:
    from eagle_train.evaluation.server import compare_with_server, server_fault, server_lines

    report = compare_with_server(head, target, url, **given)
    print(json.dumps(report, indent=2, ensure_ascii=False) if as_json else "\n".join(server_lines(report)))
    return options.fail_on(server_fault(report))
