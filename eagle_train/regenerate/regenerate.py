"""``eagle regenerate``: the conversations of some files, answered anew by the target."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from eagle_train import distributed
from eagle_train.data.reading import Tally
from eagle_train.data.sources import find_sources
from eagle_train.data.templates import Arguments, load_template
from eagle_train.errors import UserError
from eagle_train.progress import progress
from eagle_train.provenance import tool_version
from eagle_train.regenerate.answers import AnswerSettings, Asked, read_asked
from eagle_train.regenerate.failures import Failures
from eagle_train.regenerate.local import LocalAnswers
from eagle_train.regenerate.output import finished_report, is_complete, write_output
from eagle_train.regenerate.server import Server, ServerAnswers
from eagle_train.regenerate.work import Work, open_work
from eagle_train.targets.load import Target, load_target

Answers = LocalAnswers | ServerAnswers


def regenerate(
    sources: list[str],
    target: str | Path | Target,
    out: str | Path,
    *,
    settings: AnswerSettings | None = None,
    server: Server | None = None,
    chat_template: str | None = None,
    template_arguments: Arguments | None = None,
    num_slots: int | None = None,
    dtype: str | torch.dtype = "auto",
    device: str | torch.device | None = None,
    device_map: str | None = None,
    max_failures: int = 100,
    skip_bad: bool = False,
    trust_remote_code: bool = False,
    show: bool = True,
) -> dict[str, Any]:
    """Answer every user turn of `sources` anew, in order, on the new history; write the Answers record `out`.

    `target` answers in this process, `num_slots` texts at a time, or, with `server`, is the model that the
    server is asked for. Under torchrun each rank answers its share. Answers are kept as they come: the same
    call again goes on, and a finished `out` is left alone. Returns the report that lies beside `out`, with
    ``"reused"``, or None for ``"failed"`` and the like on a rank that is not the last to end.

    Raises UserError for anything the user must change, and when more than `max_failures` answers failed.
    """
    file = Path(out)
    settings = settings or AnswerSettings()
    inputs = find_sources(sources)
    tally = Tally()
    asked = read_asked(inputs, tally, skip_bad)
    if not asked:
        reasons = ", ".join(f"{kind}: {count}" for kind, count in tally.skipped.by_count().items())
        raise UserError(f"no prompt in {tally.read} records ({reasons or 'the input is empty'})")
    answers: Answers
    if server is not None:
        _refuse_for_servers(chat_template)
        name = target.name if isinstance(target, Target) else str(target)
        answers = ServerAnswers(server, name, settings, template_arguments, trust_remote_code)
    else:
        if not isinstance(target, Target):
            target = load_target(
                target, dtype=dtype, device=device, device_map=device_map, trust_remote_code=trust_remote_code
            )
        template = load_template(target.tokenizer, chat_template, template_arguments)
        answers = LocalAnswers(target, template, settings, num_slots)
    identity = {
        "inputs": [source.identity for source in inputs],
        "generated_by": answers.generated_by,
    }
    earlier = finished_report(file, identity)
    if earlier is not None:
        return {**earlier, "reused": True}
    read = {
        "records": tally.read,
        "skipped": tally.skipped.by_count(),
        "skipped_examples": tally.skipped.examples,
        "bad": tally.num_bad,
        "bad_records": tally.bad,
    }
    with open_work(file, identity, distributed.rank()) as work:
        mine = asked[distributed.rank() :: distributed.world_size()]
        with progress("regenerate", _left(mine, work), "answers", show and distributed.is_main()) as bar:
            answers.run(mine, work, Failures(work, file, max_failures), bar)
        with work.alone():  # of several workers that end together one writes, and finds all there
            if not is_complete(asked, work):
                return {"reused": False, "complete": False}
            report = write_output(
                file, asked, work, {**identity, "tool_version": tool_version(), "complete": True}, read
            )
            if not report["failed"]:
                work.remove()
    return {**report, "reused": False}


def _left(asked: list[Asked], work: Work) -> int:
    """Return how many answers there may still be to make."""
    answered = [(conversation, work.answers(conversation)) for conversation in asked]
    return sum(
        conversation.num_turns - len(answers)
        for conversation, answers in answered
        if work.wanted(conversation, answers)
    )


def _refuse_for_servers(chat_template: str | None) -> None:
    if chat_template is not None:
        raise UserError(f"--chat-template {chat_template}: a server renders by its own; leave it out")
    if distributed.world_size() > 1:
        raise UserError("--server is asked by one process; start it without torchrun")
