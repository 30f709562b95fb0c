"""``eagle extract``: parse, then one call."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import typer

from . import options

_FEW = 1_000_000  # tokens
NAME = "extract"
HELP = "Run the frozen target once and keep its features in shards."
EXAMPLES = """
**Examples**

    eagle extract rows/ --target HuggingFaceTB/SmolLM2-135M-Instruct --for eagle3 --out shards/

    eagle extract rows/ --target ./my-model --for eagle1 --codec fp32 --processes 4 --out shards/

    torchrun --nproc-per-node 8 -m eagle_cli.main extract rows/ --target ./my-model --out shards/
"""


def run(
    rows: options.Rows,
    target: options.Target,
    out: Path = typer.Option(..., "--out", help="Folder for the shards; what is finished there is kept."),
    features: str = typer.Option("eagle3", "--for", help="eagle3, eagle1, medusa or all."),
    codec: str = typer.Option(
        "bf16",
        "--codec",
        help="How states are stored: bf16, fp32, fp8 or int8; of the last two fp8 is closer.",
    ),
    label_top_k: options.LabelTopK = 0,
    dtype: options.Dtype = "auto",
    layers: str | None = typer.Option(
        None, "--layers", help="Layers to tap, k = the stream entering layer k; default 2, n//2, n-3."
    ),
    processes: int | None = typer.Option(
        None,
        "--processes",
        help="Workers on this machine; default one a GPU, or one a core as far as memory and work allow.",
    ),
    device: options.Device = None,
    device_map: options.DeviceMap = None,
    tensor_parallel: int | None = typer.Option(
        None,
        "--tensor-parallel",
        help="For a target larger than one GPU: so many processes, each on a GPU of its own, hold a part of "
        "every layer, by transformers' plan; for extraction. Inside torchrun its number of processes.",
    ),
    threads: int | None = typer.Option(
        None,
        "--threads",
        min=1,
        max=4096,
        help="Threads of a CPU worker; default 1, more where memory holds few workers.",
    ),
    batch_tokens: int | None = typer.Option(
        None,
        "--batch-tokens",
        min=1,
        help="Tokens of a batch with its padding; default 4096, on a GPU 16384.",
    ),
    shard_tokens: int | None = typer.Option(
        None,
        "--shard-tokens",
        min=1,
        help="Tokens of one shard, about; it is whole batches, so --batch-tokens at least. Default a "
        "sixteenth of all, at most 32768.",
    ),
    max_bad_rows: int | None = typer.Option(
        None, "--max-bad-rows", min=0, help="Rows with NaN features to skip before stopping; default 1 %."
    ),
    trust_remote_code: options.TrustRemoteCode = False,
    ignore_disk: bool = typer.Option(False, "--ignore-disk", help="Start although the disk lacks the room."),
    as_json: options.AsJson = False,
    worker: bool = typer.Option(False, "--worker", hidden=True, help="Started by this command itself."),
) -> None:
    from eagle_train import distributed
    from eagle_train.targets.workers import start_workers

    summary = start_workers(
        rows,
        target,
        out,
        processes=processes,
        device_map=device_map,
        tensor_parallel=tensor_parallel,
        ignore_disk=ignore_disk,
        max_bad_rows=max_bad_rows,
        features=features,
        codec=codec,
        label_top_k=label_top_k,
        dtype=dtype,
        layer_ids=options.parse_layers("--layers", layers),
        batch_tokens=batch_tokens,
        shard_tokens=shard_tokens,
        threads=threads,
        device=device,
        trust_remote_code=trust_remote_code,
        announce=not worker,
    )
    if not worker and distributed.is_main():
        _report(summary, rows, target, as_json)


def kept(out: Path, **_: Any) -> str:
    """Say what an interrupted extraction leaves."""
    return "finished shards are kept" if any(out.glob("shard-*.safetensors")) else "no shard was finished yet"


def _report(summary: dict[str, Any], rows: Path, target: str, as_json: bool) -> None:
    if as_json:
        print(json.dumps(summary))
        return
    from eagle_train.progress import bytes_text, counted

    size = bytes_text(summary["bytes"] + summary["target_bytes"])
    skipped = (
        f", {counted(summary['skipped'], 'row')} skipped (features not finite)" if summary["skipped"] else ""
    )
    if top := summary["label_top_k"]:
        kept = "" if summary["label_mass"] is None else f", {summary['label_mass']:.2%} of its probability"
        skipped += f"; of each label the {top} likeliest tokens{kept}"
    print(
        f"{summary['out']}: {counted(summary['rows'], 'row')}, {counted(summary['tokens'], 'token')}, "
        f"{summary['labels']:,} supervised, {counted(summary['shards'], 'shard')}, {size}{skipped}"
    )
    recipe = summary["features"] if summary["features"] != "all" else "eagle3"
    if recipe == "eagle3" and summary["tokens"] < _FEW:
        recipe = "eagle3-smollm2"  # whose steps are small; the paper's settings have hardly begun by then
    print(f"next: eagle train {shlex.quote(summary['out'])} --recipe {recipe} --out run/")
