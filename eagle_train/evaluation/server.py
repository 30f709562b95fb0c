"""A running engine's own counters beside our loop's, on the same prompts, greedily."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from eagle_train.decoding.drafters import Drafter
from eagle_train.decoding.loop import Settings, generate
from eagle_train.decoding.sampling import Sampling
from eagle_train.errors import UserError
from eagle_train.evaluation.counters import Counters, add_up, loop_counters
from eagle_train.evaluation.engines import find_engine
from eagle_train.evaluation.heads import open_head
from eagle_train.evaluation.methods import head_drafter
from eagle_train.evaluation.questions import Question, conversations, read_questions
from eagle_train.evaluation.report import draft_name
from eagle_train.progress import counted, progress
from eagle_train.targets.load import Target, dtype_name, load_target


def compare_with_server(
    head: str | Path,
    target: str | Target,
    url: str,
    questions: str | Path | Sequence[Question] | None = None,
    *,
    max_new_tokens: int = 128,
    num_questions: int | None = None,
    dtype: str = "auto",
    chat_template: str | None = None,
    trust_remote_code: bool = False,
    show: bool = True,
) -> dict[str, Any]:
    """Ask a vLLM or SGLang server and our loop the same first turns greedily; return both sides' figures.

    The loop drafts as the server does: a chain as long as vLLM's counters have positions, or what SGLang's
    settings say (a chain, or EAGLE-2's tree). `acceptance_length` is by the engine's own definition on both
    sides, ``counts_as`` names it. ``differences`` lists every prompt whose ids or counters differ; in float32
    on both sides there are none. Processors of logits that the target's own files name are set aside on both
    sides. Raises UserError for a server that cannot be used and for whatever else the user must change.
    """
    engine = find_engine(url)
    if not isinstance(target, Target):
        target = load_target(target, dtype=dtype, trust_remote_code=trust_remote_code)
    if questions is None or isinstance(questions, str | Path):
        questions = read_questions(questions, num_questions)
    loaded = open_head(head, target)
    settings = Settings(max_new_tokens=max_new_tokens)
    drafter: Drafter | None = None
    sides: list[tuple[Counters, Counters]] = []
    differences, tokens = [], [0, 0]
    with progress("eval --against-server", len(questions), "prompts", show) as bar:
        for question, conversation in conversations(target.tokenizer, list(questions), chat_template):
            prompt = conversation.ask(0)
            theirs, served = engine.ask(prompt, max_new_tokens, target.eos_ids)
            shape = engine.shape(served)
            drafter = drafter or head_drafter(loaded, target, shape, Sampling())
            made = generate(target, drafter, prompt, settings)
            ours = loop_counters(made, len(served.by_position))
            sides.append((ours, served))
            tokens = [tokens[0] + len(made.ids), tokens[1] + len(theirs)]
            if made.ids != theirs or ours != served:
                differences.append(
                    {
                        "question": question.id,
                        "same_text": made.ids == theirs,
                        "loop": engine.figures(ours, len(made.ids)),
                        "server": engine.figures(served, len(theirs)),
                    }
                )
            bar.advance(1)
    loop, server = (add_up([side[i] for side in sides]) for i in (0, 1))
    if not server.drafts:
        raise UserError(
            f"{engine.url}: not one draft was counted in {counted(len(sides), 'prompt')}, "
            "so nothing could be compared; does the server draft, and has --max-new-tokens room for it?"
        )
    who = {"url": engine.url, "engine": engine.name, "model": engine.model}
    return {
        "head": str(head),
        "target": target.name,
        "server": {**who, **engine.figures(server, tokens[1])},
        "loop": {**engine.figures(loop, tokens[0]), "dtype": dtype_name(target.dtype)},
        "counts_as": engine.counts_as,
        "prompts": len(sides),
        "tokens": tokens[1],
        "tree": shape.figures,
        "temperature": 0.0,
        "max_new_tokens": max_new_tokens,
        "processors_set_aside": target.own_settings,
        "differences": differences,
    }


def server_fault(report: dict[str, Any]) -> str | None:
    """Return a sentence where ids or counters of server and loop differ anywhere, else None."""
    if not report["differences"]:
        return None
    first = report["differences"][0]
    what = "counters" if first["same_text"] else "text"
    return (
        f"server and loop differ on {len(report['differences'])} of {counted(report['prompts'], 'prompt')}; "
        f"first: question {first['question']}, in its {what}"
    )


def server_lines(report: dict[str, Any]) -> list[str]:
    """Return the report of `compare_with_server` as lines of text."""
    server = report["server"]
    found = [
        f"head {report['head']} on {report['target']}: {counted(report['prompts'], 'prompt')}, "
        f"{counted(report['tokens'], 'token')}, greedy, {draft_name(report['tree'])}, up to "
        f"{counted(report['max_new_tokens'], 'new token')}; "
        f"acceptance length as {server['engine']} counts it, {report['counts_as']}"
    ]
    if own := report["processors_set_aside"]:
        found.append(f"  on both sides without the target's own {', '.join(own)}")
    names = {
        "server": f"{server['engine']} at {server['url']}",
        "loop": f"our loop, {report['loop']['dtype']}",
    }
    for side, name in names.items():
        shares = " ".join(f"{share:.3f}" for share in report[side]["accepted_by_position"])
        found.append(
            f"  {name}: acceptance length {report[side]['acceptance_length']:.3f} in "
            f"{counted(report[side]['drafts'], 'round')}, accepted by position {shares}"
        )
    texts = sum(not difference["same_text"] for difference in report["differences"])
    if count := len(report["differences"]):
        found.append(
            f"  {counted(count, 'prompt')} differ{'s' if count == 1 else ''}, {texts} of them in their text; "
            "rounding to half precision, another head, or other users of the server can explain that"
        )
    else:
        found.append("  every text and every counter equal")
    return found
