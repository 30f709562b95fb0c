"""``eagle plan``: parse, then one call."""

from __future__ import annotations

import json
import shlex
from typing import Any

import typer

from . import options

_FREE = 0.9  # of a core; below, other work is said to be there

NAME = "plan"
HELP = "Say what extraction and training will take: bytes, memory, hours. Nothing is made."
EXAMPLES = """
**Examples**

    eagle plan rows/ --target HuggingFaceTB/SmolLM2-135M-Instruct --recipe eagle3-smollm2

    eagle plan rows/ --target ./my-model --recipe eagle3 --codec fp8 --seconds 0

    eagle plan rows/ --target ./my-model --recipe eagle3 --set run.epochs=2 --processes 8 --json
"""


def run(
    rows: options.Rows,
    target: options.Target,
    recipe: str = typer.Option(..., "--recipe", help="A built-in recipe or a .yaml file, as for train."),
    settings: list[str] = typer.Option(
        [], "--set", metavar="KEY=VALUE", help="Change one setting, such as run.epochs=2; repeatable."
    ),
    codec: str = typer.Option("bf16", "--codec", help="How states would be stored: bf16, fp32, fp8 or int8."),
    label_top_k: options.LabelTopK = 0,
    dtype: options.Dtype = "auto",
    device: options.Device = None,
    processes: int | None = typer.Option(
        None, "--processes", min=1, help="Extraction workers; default as many as extract would start."
    ),
    tensor_parallel: int | None = typer.Option(
        None,
        "--tensor-parallel",
        help="As for extract: the memory is that of one of so many processes. Nothing is tried then.",
    ),
    seconds: float | None = typer.Option(
        None,
        "--seconds",
        min=0,
        max=3600,
        help="Try extraction and training so long each; default 10, 0 leaves it out.",
    ),
    trust_remote_code: options.TrustRemoteCode = False,
    as_json: options.AsJson = False,
) -> None:
    from eagle_train.estimate import estimate
    from eagle_train.recipe_files import load_recipe

    found = estimate(
        rows,
        target,
        load_recipe(recipe, settings),
        codec=codec,
        label_top_k=label_top_k,
        dtype=dtype,
        device=device,
        processes=processes,
        tensor_parallel=tensor_parallel,
        seconds=seconds,
        trust_remote_code=trust_remote_code,
    )
    if as_json:
        print(json.dumps(found))
        return
    for line in _lines(found):
        print(line)
    layers = f" --layers {','.join(map(str, found['layer_ids']))}" if found["layer_ids"] else ""
    layers += f" --label-top-k {label_top_k}" if label_top_k else ""
    layers += f" --tensor-parallel {tensor_parallel}" if tensor_parallel else ""
    print(
        f"next: eagle extract {shlex.quote(str(rows))} --target {shlex.quote(target)} "
        f"--for {found['features']}{layers} --codec {codec} --out shards/"
    )


def _lines(found: dict[str, Any]) -> list[str]:
    from eagle_train.progress import bytes_text, counted, parameters_text

    sizes = ", ".join(f"{codec} {bytes_text(size)}" for codec, size in found["bytes"].items())
    memory, hours = found["memory"], found["hours"]
    packed = f", what {found['quantisation']} packs as it is stored" if found["quantisation"] else ""
    if found["tensor_parallel"]:
        packed = f", each of {found['tensor_parallel']} processes"
    lines = [
        f"{counted(found['rows'], 'row')}, {counted(found['tokens'], 'token')}, {found['labels']:,} "
        f"supervised: "
        f"{counted(found['shards'], 'shard')}",
        f"disk by codec: {sizes}; {bytes_text(found['target_bytes'])} of each is the target's embedding and "
        "lm_head",
        f"memory of a device, activations left out: extraction {bytes_text(memory['target'])} "
        f"(target in {found['dtype']}{packed}); training {bytes_text(memory['training'])} "
        f"(head of {parameters_text(memory['head_parameters'])})",
    ]
    if hours is not None:
        free, share = found["hours_if_free"], found["share_of_a_core"]
        lines += [
            f"extract: {_time(hours['extract'])} on {found['workers']} x {found['device']}, each "
            f"{found['extract_tokens_per_second_of_a_worker']:,.0f} tokens/s",
            f"train: {_time(hours['train'])} on one {found['device']}, "
            f"{found['train_tokens_per_second']:,.0f} tokens/s"
            + (f", {found['train_tokens']:,} tokens" if found["train_tokens"] is not None else "")
            + _cut_short(found),
        ]
        if min(share.values()) < _FREE:
            lines.append(
                f"busy: other work left this process {share['extract']:.0%} of a core while extracting and "
                f"{share['train']:.0%} while training; were the machine free: extract "
                f"{_time(free['extract'])}, train {_time(free['train'])}"
            )
    return lines


def _cut_short(found: dict[str, Any]) -> str:
    """Say where the clock ends training before its tokens are seen."""
    minutes, tokens = found["train_minutes_at_most"], found["train_tokens"]
    seen = 60 * (minutes or 0) * found["train_tokens_per_second"]
    if minutes is None or tokens is None or seen >= tokens:
        return ""
    return f", of which run.minutes={minutes:g} lets it see some {seen:,.0f} (--set run.minutes=null: all)"


def _time(hours: float) -> str:
    from eagle_train.progress import span

    return span(3600 * hours)
