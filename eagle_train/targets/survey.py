"""What extraction will do, from the rows and the target's config alone: no weights, no work yet."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from eagle_train.distributed import num_cores
from eagle_train.errors import UserError
from eagle_train.folders import what_is_in
from eagle_train.heads.config import HeadConfig
from eagle_train.heads.rotary import Rotary
from eagle_train.io.paths import os_error
from eagle_train.io.text import read_json
from eagle_train.progress import bytes_text, counted
from eagle_train.provenance import tokenizer_fingerprint
from eagle_train.shards.codecs import CODECS, check_codec, check_top_labels
from eagle_train.shards.frozen_target import TENSORS
from eagle_train.shards.plan import RowTable, default_shard_tokens, make_plan
from eagle_train.shards.schema import (
    MANIFEST,
    PLAN,
    Plan,
    Setting,
    check_features,
    holds_aux,
)
from eagle_train.shards.sizes import directory_size
from eagle_train.shards.writer import finished_shard
from eagle_train.targets import checkpoint, plans
from eagle_train.targets.capture import check_layer_ids, default_layer_ids
from eagle_train.targets.headers import stored_tensors
from eagle_train.targets.lengths import check_length
from eagle_train.targets.load import dtype_name, parse_dtype, pick_device
from eagle_train.targets.memory import free_memory, total_memory
from eagle_train.targets.packed import refuse_packed
from eagle_train.targets.stored import weights_bytes

_WORTH_SHARING = 5e11  # operations of the forwards; below, starting workers takes longer than the work
_BATCH_TOKENS = {"cpu": 4096, "cuda": 16_384}


@dataclass(frozen=True)
class Survey:
    """Rows, plan and sizes. The plan's target has no weights' fingerprint yet."""

    dataset: Any
    table: RowTable
    rows_info: dict[str, Any]
    plan: Plan
    device: torch.device
    dtype: torch.dtype
    num_parameters: int
    weights_bytes: int  # of the target in the memory of one process
    config: Any  # the target's, of transformers

    @property
    def target_bytes(self) -> int:
        """Bytes of the frozen target's files: embedding, lm_head where it is not tied, and the config."""
        setting = self.plan.setting
        count = 1 if self.config.get_text_config().tie_word_embeddings else 2
        tensors = count * setting.vocab_size * setting.hidden_size * self.dtype.itemsize
        return tensors + len(json.dumps(checkpoint.plain_config(self.config.get_text_config()), indent=2))

    def directory_size(self, codec: str) -> int:
        """Bytes of everything that extraction writes with this codec."""
        plan = make_plan(self.table, replace(self.plan.setting, codec=codec))
        distinct = len(self.rows_info.get("supervised_frequencies", {}))
        return directory_size(plan, self.table, distinct, self.target_bytes)

    def size_text(self) -> str:
        """One line: rows, tokens, shards, bytes on disk."""
        plan = self.plan
        per_token = plan.size / max(1, plan.tokens)
        return (
            f"{counted(plan.num_rows, 'row')}, {counted(plan.tokens, 'token')}, {plan.labels:,} supervised: "
            f"{counted(len(plan.shards), 'shard')}, {bytes_text(plan.size)} on disk "
            f"({per_token / 1024:.1f} KiB a token, {plan.setting.codec}), and "
            f"{bytes_text(self.target_bytes)} of the target's embedding and lm_head"
        )


def survey(
    rows_dir: str | Path,
    target: str,
    out: str | Path | None,
    *,
    features: str = "eagle3",
    codec: str = "bf16",
    label_top_k: int = 0,
    dtype: str | torch.dtype = "auto",
    layer_ids: Sequence[int] | None = None,
    batch_tokens: int | None = None,
    shard_tokens: int | None = None,
    threads: int | None = None,
    device: str | torch.device | None = None,
    trust_remote_code: bool = False,
    tensor_parallel: int = 0,
) -> Survey:
    """Read rows and config, check that they belong together, and plan.

    `batch_tokens`, `shard_tokens` and `threads` default to those of a plan that `out` already holds; `out`
    None plans anew. `tensor_parallel` above 0 is the number of processes among which every layer is cut.
    Raises UserError for anything the user must change.
    """
    from eagle_train.data.rows import open_rows
    from eagle_train.data.tokenizer import load_tokenizer

    check_features(features)
    check_codec(codec)
    rows = open_rows(rows_dir)
    table = RowTable.of(rows.dataset)
    if not len(table):
        raise UserError(f"{rows_dir}: holds no rows; run eagle prepare with more conversations")
    config = checkpoint.load_config(str(target), trust_remote_code)
    tokenizer = load_tokenizer(str(target), trust_remote_code=trust_remote_code)
    fingerprint = tokenizer_fingerprint(tokenizer)
    if fingerprint != rows.info["tokenizer_fingerprint"]:
        raise UserError(
            f"{rows_dir}: prepared for {rows.info.get('target')} (tokenizer "
            f"{rows.info['tokenizer_fingerprint']}); {target} has tokenizer {fingerprint}. "
            f"Run eagle prepare with --target {target}"
        )
    place = pick_device(device)
    text = config.get_text_config()
    kept = parse_dtype(dtype) or checkpoint.default_dtype(
        config, place, is_gguf=str(target).endswith(".gguf")
    )
    layers: tuple[int, ...] = ()
    if holds_aux(features):
        layers = default_layer_ids(text.num_hidden_layers) if layer_ids is None else tuple(layer_ids)
        layers = check_layer_ids(layers, text.num_hidden_layers)
        if not layers:
            raise UserError(f"--for {features} needs layers; leave --layers out for the default three")
    elif layer_ids is not None:
        raise UserError(f"--for {features} stores no layers; leave --layers out")
    longest = int(table.lengths.argmax())
    check_length(text, int(table.lengths[longest]), f"{rows_dir}: row {table.row_ids[longest]}")
    _refuse_headless(text, features, layers, str(target))
    known = None if out is None else _known(Path(out))
    skeleton = checkpoint.skeleton(config, trust_remote_code)
    if tensor_parallel:
        plans.check_plan(str(target), config, skeleton, tensor_parallel)
    if not str(target).endswith(".gguf"):
        with checkpoint.explained(str(target)):
            refuse_packed(str(target), config, skeleton, stored_tensors(str(target), config))
    parameters = sum(parameter.numel() for parameter in skeleton.parameters())
    if tensor_parallel:
        weights = plans.part_bytes(skeleton, tensor_parallel, kept)
    else:
        weights = weights_bytes(str(target), config, skeleton, kept)
    budget = batch_tokens or (known.batch_tokens if known else _BATCH_TOKENS.get(place.type, 4096))
    if budget < 1 or (shard_tokens is not None and shard_tokens < 1) or (threads is not None and threads < 1):
        raise UserError("--batch-tokens, --shard-tokens and --threads: wanted 1 or more")
    setting = Setting(
        rows_fingerprint=table.fingerprint(),
        tokenizer_fingerprint=fingerprint,
        target={"name": str(target), "revision": None, "fingerprint": "", "dtype": dtype_name(kept)},
        features=features,
        layer_ids=layers,
        codec=codec,
        hidden_size=int(text.hidden_size),
        vocab_size=int(text.vocab_size),
        num_layers=int(text.num_hidden_layers),
        device=place.type,
        threads=threads or (known.threads if known else _default_threads(place, weights, tensor_parallel)),
        batch_tokens=budget,
        shard_tokens=shard_tokens
        or (known.shard_tokens if known else default_shard_tokens(int(table.lengths.sum()), budget)),
        label_top_k=check_top_labels(label_top_k, features, int(text.vocab_size)),
        tensor_parallel=tensor_parallel,
    )
    if known is not None and out is not None:  # all but the weights, which are not loaded yet
        same = {
            **setting.target,
            "revision": known.target["revision"],
            "fingerprint": known.target["fingerprint"],
        }
        known.refuse_other(replace(setting, target=same, vocab_size=known.vocab_size), Path(out))
    plan = make_plan(table, setting)
    return Survey(rows.dataset, table, rows.info, plan, place, kept, parameters, weights, config)


def _refuse_headless(config: Any, features: str, layers: tuple[int, ...], name: str) -> None:
    """Raise UserError for a family that no head can be made for: better now than after the extraction."""
    kind = "eagle3" if holds_aux(features) else "eagle1"
    try:
        Rotary(HeadConfig.for_target(checkpoint.plain_config(config), kind, feature_layers=layers))
    except UserError as error:
        raise UserError(f"{name}: {error}") from error


def _known(out: Path) -> Setting | None:
    """Return the setting of the plan that `out` holds; refuse a folder that no extraction may go on in."""
    if (out / PLAN).is_file():
        return Plan.load(out).setting
    if (out / MANIFEST).is_file() and read_json(out / MANIFEST, "choose another --out").get("assembled"):
        raise UserError(f"{out}: holds shards that were merged or split; choose another --out")
    if (found := what_is_in(out)) and not (out / MANIFEST).is_file():
        raise UserError(f"{out}: holds {found}; choose another --out")
    return None


def refuse_full_disk(work: Survey, out: Path) -> None:
    """Raise UserError when the disk lacks the room for what is still to be written."""
    existing = Plan.load(out) if (out / PLAN).is_file() else None
    of_shards = sum(
        shard.size
        for number, shard in enumerate(work.plan.shards)
        if existing is None or finished_shard(out, existing, number) is None
    )
    missing = of_shards + (work.target_bytes if not (out / TENSORS).is_file() else 0)
    place = out
    while not place.exists():
        place = place.parent
    try:
        free = shutil.disk_usage(place).free
    except OSError as error:
        raise os_error(place, error) from error
    if missing > free:
        smaller = _codec_that_fits(work, free - (missing - of_shards)) if existing is None else None
        advice = f"use --codec {smaller}, " if smaller else ""
        raise UserError(
            f"{out}: {bytes_text(missing)} to write, {bytes_text(free)} free on this disk; {advice}"
            "choose another --out, train without shards (eagle train ROWS --online --target T) or on a few "
            "at a time (--max-disk SIZE in place of --online), or --ignore-disk to try all the same"
        )


def _codec_that_fits(work: Survey, room: int) -> str | None:
    """Return the largest codec whose shards fit into `room` bytes; None where none does."""
    sizes = {name: work.directory_size(name) - work.target_bytes for name in CODECS}
    return max((name for name in sizes if sizes[name] <= room), key=sizes.__getitem__, default=None)


def default_processes(work: Survey, out: Path | None) -> int:
    """Return how many workers to start on this machine: one a GPU; one a core where memory allows.

    Never more than there are shards to do, and one where the work is smaller than starting others.
    """
    if work.device.type == "cuda":
        most = torch.cuda.device_count()
    else:
        fitting = _fitting(work.weights_bytes, free_memory())
        most = max(1, min(num_cores() // work.plan.setting.threads, fitting))
    known = Plan.load(out) if out is not None and (out / PLAN).is_file() else None
    missing = [
        shard.tokens
        for number, shard in enumerate(work.plan.shards)
        if known is None or out is None or finished_shard(out, known, number) is None
    ]
    if 2 * work.num_parameters * sum(missing) < _WORTH_SHARING:
        return 1
    return max(1, min(most, len(missing)))


def _default_threads(device: torch.device, weights: int, tensor_parallel: int = 0) -> int:
    """One thread a worker; more where memory holds fewer workers than there are cores.

    A property of the machine and not of the moment: it is part of the plan. A target that is cut has all
    cores to itself.
    """
    if device.type != "cpu":
        return 1
    if tensor_parallel:
        return max(1, num_cores() // tensor_parallel)
    return max(1, num_cores() // max(1, min(num_cores(), _fitting(weights, total_memory()))))


def _fitting(weights: int, memory: int) -> int:
    """How many workers with weights of so many bytes fit into so much memory."""
    return max(1, int(memory // (1.2 * weights + (1 << 30))))
