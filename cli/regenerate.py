"""``eagle regenerate``: parse, then one call."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from . import options

NAME = "regenerate"
HELP = "Replace the answers of conversations by the target's own."
EXAMPLES = """
**Examples**

    eagle regenerate chats.jsonl --target ./my-model --out answers.jsonl

    eagle regenerate chats.jsonl --target Qwen/Qwen3-8B --server http://localhost:8000 --out answers.jsonl.gz

    eagle regenerate chats/ --target ./model --temperature 0.7 --top-p 0.9 --max-new-tokens 2048 --out a.jsonl
"""

_OF_A_SERVER = {"served_model", "api_key_env", "in_flight", "tries", "timeout"}
_OF_THIS_PROCESS = {"batch", "dtype", "device", "device_map", "processes", "no_processors"}


def run(
    context: typer.Context,
    data: Annotated[
        list[str],
        typer.Argument(
            metavar="DATA...", help="Conversations as for eagle prepare; their answers are not looked at."
        ),
    ],
    target: options.Target,
    out: Path = typer.Option(..., "--out", help="The file to write: .jsonl or .jsonl.gz."),
    server: str | None = typer.Option(
        None,
        "--server",
        help="URL of an OpenAI-compatible server that runs the target (vLLM, SGLang). It applies the "
        "target's own processors by settings of its own.",
    ),
    served_model: str | None = typer.Option(
        None,
        "--served-model",
        help="The target's name on the server; default its own, or the only one there.",
    ),
    api_key_env: str | None = typer.Option(
        None, "--api-key-env", help="The environment variable that holds the server's key."
    ),
    in_flight: int = typer.Option(256, "--in-flight", help="Conversations asked for at the same time."),
    tries: int = typer.Option(6, "--tries", help="Tries of one request, with longer and longer pauses."),
    timeout: float = typer.Option(600.0, "--timeout", help="Seconds that one request may take."),
    temperature: options.Temperature = 0.0,
    top_p: options.TopP = 1.0,
    max_new_tokens: int = typer.Option(
        1024, "--max-new-tokens", help="Tokens of one answer, thoughts included."
    ),
    seed: options.Seed = 0,
    no_processors: options.NoProcessors = False,
    thinking: str = typer.Option(
        "keep", "--thinking", help="keep or strip what a reasoning model thinks before it answers."
    ),
    chat_template: options.ChatTemplate = None,
    template_arg: options.TemplateArg = None,
    batch: int | None = typer.Option(
        None, "--batch", min=1, help="Texts continued at once in process; default 32, on a GPU 128."
    ),
    dtype: options.Dtype = "auto",
    device: options.Device = None,
    device_map: options.DeviceMap = None,
    processes: int | None = typer.Option(
        None, "--processes", min=1, help="Workers on this machine; default one a GPU, on a CPU one."
    ),
    max_failures: int = typer.Option(
        100, "--max-failures", min=0, help="Answers of a worker that may fail before it stops."
    ),
    skip_bad: options.SkipBad = False,
    trust_remote_code: options.TrustRemoteCode = False,
    as_json: options.AsJson = False,
    worker: bool = typer.Option(False, "--worker", hidden=True, help="Started by this command itself."),
) -> None:
    from eagle_train import distributed
    from eagle_train.data.templates import parse_arguments
    from eagle_train.errors import UserError, nearest
    from eagle_train.regenerate.answers import AnswerSettings
    from eagle_train.regenerate.regenerate import regenerate
    from eagle_train.regenerate.server import Server
    from eagle_train.regenerate.workers import default_processes, start_workers

    if thinking not in ("keep", "strip"):
        raise UserError(f"--thinking {thinking}: wanted keep or strip{nearest(thinking, ('keep', 'strip'))}")
    if server is not None:
        options.refuse_unread(context, _OF_THIS_PROCESS, "with --server a server answers")
    else:
        options.refuse_unread(context, _OF_A_SERVER, "without --server the target answers here")
    if distributed.launched():
        options.refuse_unread(context, {"processes"}, "torchrun has started the workers")
    if not out.name.lower().removesuffix(".gz").endswith((".jsonl", ".ndjson")):
        raise UserError(f"--out {out}: wanted a file ending in .jsonl or .jsonl.gz, which prepare reads")
    own = not no_processors
    settings = AnswerSettings(temperature, top_p, max_new_tokens, seed, thinking == "keep", processors=own)
    arguments = parse_arguments(template_arg or [])
    asked = None
    if server is not None:
        asked = Server(server, served_model, in_flight, tries, timeout, api_key_env)
    elif not distributed.launched():
        count = processes or default_processes(device, device_map)
        if count > 1:
            typed = [*options.typed(context, leaving=("processes", "as_json")), "--worker"]
            _report(start_workers(count, typed, out), out, target, as_json)
            return
    report = regenerate(
        data,
        target,
        out,
        settings=settings,
        server=asked,
        chat_template=chat_template,
        template_arguments=arguments,
        num_slots=batch,
        dtype=dtype,
        device=device,
        device_map=device_map,
        max_failures=max_failures,
        skip_bad=skip_bad,
        trust_remote_code=trust_remote_code,
    )
    if not worker and report.get("complete"):
        _report(report, out, target, as_json)


def kept(out: Path, **_: Any) -> str:
    """Say what interrupted answering leaves."""
    parts = out.with_name(f"{out.name}.work").glob("part-*.jsonl")
    return (
        "finished answers are kept"
        if any(part.stat().st_size for part in parts)
        else "no answer was made yet"
    )


def _report(report: dict[str, Any], out: Path, target: str, as_json: bool) -> None:
    import shlex

    from eagle_train.regenerate.output import lines_of

    if as_json:
        print(json.dumps(report, indent=2, ensure_ascii=False))
        return
    if report["reused"]:
        print(f"{out}: these answers are already there; nothing to do")
    for line in lines_of(report):
        print(line)
    print(f"next: eagle prepare {shlex.quote(str(out))} --target {shlex.quote(target)} --out rows/")
