"""Acceptance without decoding: a draft's figures from texts that the target wrote, by one pass over them."""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from eagle_train.data.prepare import prepare
from eagle_train.decoding.drafters import HeadDrafter
from eagle_train.decoding.medusa import static_shape
from eagle_train.decoding.processors import own_processors
from eagle_train.decoding.sampling import Sampling
from eagle_train.decoding.shapes import Chain, Dynamic, Sampled, Shape
from eagle_train.decoding.trees import StaticShape
from eagle_train.errors import UserError
from eagle_train.evaluation.figures import ByKind, acceptance_figures
from eagle_train.evaluation.heads import checkpoint_of, find_head, run_of
from eagle_train.evaluation.replay import NEVER, replay_chain, replay_paths, tables
from eagle_train.evaluation.tree_replay import drafter_of_tables, replay_tree, tree_tables
from eagle_train.folders import what_is_in
from eagle_train.heads.config import HeadConfig, check_window
from eagle_train.heads.disk import Head
from eagle_train.heads.foreign import read_any
from eagle_train.heads.medusa import MedusaHead
from eagle_train.losses.acceptance import AcceptanceCounts, chain_hits
from eagle_train.progress import progress
from eagle_train.shards.batches import PackedBatch
from eagle_train.shards.codecs import refuse_top_labels
from eagle_train.shards.frozen_target import FrozenTarget
from eagle_train.shards.reader import Shards, open_shards
from eagle_train.shards.schema import MANIFEST, holds_feature_of
from eagle_train.targets.extract import extract
from eagle_train.targets.generation import check_settings, own_settings
from eagle_train.targets.load import default_device, load_target
from eagle_train.training.loader import Loader
from eagle_train.training.trained_on import other_weights, rows_not_trained_on, trained_on

_TOKENS_AT_ONCE = 4096

Began = tuple[int, float, float]  # an entry of a batch's rows; how many rounds began there, what they emitted


def predict(
    head: str | Path | Head,
    texts: str | Path,
    target: str | None = None,
    *,
    gamma: int = 3,
    draft: Shape | None = None,
    sampling: Sampling | None = None,
    dtype: str = "auto",
    device: str | torch.device | None = None,
    rows: Sequence[int] | None = None,
    chat_template: str | None = None,
    trust_remote_code: bool = False,
    other_target: bool = False,
    processors: bool = True,
    show: bool = True,
) -> dict[str, Any]:
    """Return the figures that `draft`, by default a chain of `gamma` guesses, has on `texts`.

    `texts` is a folder of shards, or conversations in any form that prepare reads, for which `target` is
    needed: its features are then taken, unrounded, into a temporary folder. The head runs in float32. Exact
    where the target wrote the answers greedily and its features are not rounded, close where they are, a
    mere estimate on other people's answers. Dynamic trees are grown anew at every place of a text, which
    takes as long as drafting there. `rows` chooses rows; None means all, but where `head` is a run that read
    these rows, from whichever shards, only the conversations that it held out; ``which_rows`` says which. A
    head known to be trained on other weights of the target is refused without `other_target`. `processors`
    says that the answers were written with those that the target's generation_config sets, as `evaluate` and
    `regenerate` write. Raises UserError for anything the user must change.
    """
    shape, sampling = draft or Chain(gamma), sampling or Sampling()
    if isinstance(shape, Sampled) and not sampling.greedy:
        raise UserError(
            "predict: a sampled tree depends on more than the text; give a chain, a static or a dynamic "
            "tree, or decode"
        )
    where = find_head(head) if isinstance(head, str | Path) else None
    shards = open_shards(texts) if (Path(texts) / MANIFEST).is_file() else None
    if shards is None and (found := what_is_in(texts)):
        raise UserError(f"{texts}: {found}, wanted shards of eagle extract, or conversations with --target")
    if shards is None and target is None:
        raise UserError(
            f"{texts}: no folder of shards; for a file of answers give --target, whose features are needed"
        )
    if where is not None and not other_target and trained_on(where) is not None:
        known = shards.info["target"] if shards else _identity(str(target), dtype, trust_remote_code)
        if words := other_weights(where, known):
            raise UserError(f"{words}; give --other-target to predict all the same")
    if isinstance(head, str | Path):
        assert where is not None
        name, loaded = str(head), read_any(where, shards.info["num_layers"] if shards else None)
    else:
        name, loaded = "as given", copy.deepcopy(head)  # it is cast below
    if isinstance(loaded, MedusaHead):
        static_shape(loaded.config, shape)  # refuses what Medusa heads cannot draft
    device = default_device() if device is None else device
    if shards is not None:
        rows, which = _chosen(rows, where, shards)
        figures = _figures(loaded, shards, rows, shape, sampling, processors, device, show, str(texts))
    else:
        assert target is not None
        with tempfile.TemporaryDirectory(prefix="eagle-predict-") as temporary:
            folder = Path(temporary)
            prepare(
                [str(texts)],
                target,
                folder / "rows",
                chat_template=chat_template,
                trust_remote_code=trust_remote_code,
                show=False,
            )
            extract(
                folder / "rows",
                target,
                folder / "shards",
                features=loaded.config.kind,
                codec="fp32",
                dtype=dtype,
                layer_ids=loaded.config.feature_layers or None,
                trust_remote_code=trust_remote_code,
                show=show,
                announce=False,
            )
            shards = open_shards(folder / "shards")
            rows, which = _chosen(rows, where, shards)
            figures = _figures(loaded, shards, rows, shape, sampling, processors, device, show, str(texts))
    return {
        "head": name,
        "checkpoint": checkpoint_of(head) if isinstance(head, str | Path) else None,
        "kind": loaded.config.kind,
        "target": shards.info["target"]["name"],
        "texts": str(texts),
        "rows": len(rows),
        "which_rows": which,
        "predicted": True,
        "temperature": sampling.temperature,
        "codec": shards.info["codec"],
        "dtype": shards.info["target"]["dtype"],
        **figures,
        "tree": shape.figures,
    }


def _chosen(rows: Sequence[int] | None, head: Path | None, shards: Shards) -> tuple[Sequence[int], str]:
    """Return the rows to predict on, and in words which they are."""
    if rows is not None:
        return rows, "as given"
    return rows_not_trained_on(None if head is None else run_of(head.resolve()), shards)


def _figures(
    head: Head,
    shards: Shards,
    rows: Sequence[int],
    shape: Shape,
    sampling: Sampling,
    processors: bool,
    device: str | torch.device,
    show: bool,
    texts: str,
) -> dict[str, Any]:
    """Replay the draft over the rows, batch by batch."""
    _check(head.config, shards)
    head = head.to(device=device, dtype=torch.float32).eval()
    frozen = shards.frozen_target().to(device, torch.float32)
    depth = int(shape.figures["depth"])  # type: ignore[call-overload]
    loader = Loader(shards, head.config.kind, depth, _TOKENS_AT_ONCE)
    if (top := shards.info.get("label_top_k")) and not sampling.greedy:
        raise UserError(
            f"{shards.folder}: holds the {top} likeliest tokens of each label; --predict at a temperature "
            "needs the states: extract without --label-top-k, or predict greedily"
        )
    own = frozen.generation if processors else {}
    check_settings(own_settings(own), shards.info["target"]["name"], int(shards.info["vocab_size"]))
    if own and not sampling.greedy:
        eos_ids = tuple(own.get("eos_token_id", ()))
        sampling = replace(sampling, processors=own_processors(own, eos_ids, shards.info["target"]["name"]))
    by_kind, counts, rounds, tokens = ByKind(), AcceptanceCounts(), 0.0, 0
    # Medusa's guesses are no samples: they stand by the target's law alone, as greedy ones do
    samples = not (sampling.greedy or isinstance(head, MedusaHead))
    by_law = isinstance(shape, Chain) and (shape.stop > 0 or samples)
    layers, impossible = int(shards.info["num_layers"]), []  # type: int, list[tuple[int, int]]
    drafter = drafter_of_tables(head, frozen, layers) if isinstance(shape, Dynamic) else None
    with progress("eval --predict", sum(int(shards.lengths[row]) for row in rows), "tokens", show) as bar:
        for numbers, batch in loader.numbered(rows):
            batch, categories = batch.to(device), [shards.categories[row] for row in numbers]
            if isinstance(shape, Chain) and by_law:
                found = tables(head, frozen, batch, depth, sampling)
                expected = replay_chain(found, shape.gamma, sampling.greedy, shape.stop)
                rounds, tokens = rounds + expected.rounds, tokens + expected.tokens
                impossible += _places(found.impossible, batch, numbers)
                _refuse_impossible(impossible, tokens, sampling, shards, texts)
                _sort(expected.began, batch, categories, by_kind)
            else:
                replayed, began = _replayed(head, frozen, batch, shape, drafter)
                counts += replayed
                _sort(began, batch, categories, by_kind)
                rounds, tokens = float(counts.rounds), counts.tokens
            bar.advance(batch.num_tokens, f"tau {tokens / max(rounds, 1):.3f}")
    found_also = {"processors": own_settings(own), **by_kind.figures}
    if by_law:
        tau = tokens / rounds if rounds else 1.0
        return {"tau": tau, "rounds": rounds, "tokens": tokens, **found_also}
    return {**acceptance_figures(counts, depth), **found_also}


def _places(entries: Sequence[int], batch: PackedBatch, numbers: Sequence[int]) -> list[tuple[int, int]]:
    """Return the row of the shards and the position there of the token that follows each entry of a batch."""
    rows = batch.rows[list(entries)]
    documents = (torch.searchsorted(batch.row_starts, rows, right=True) - 1).tolist()
    positions = (batch.position[rows] + 2).tolist()
    return [(numbers[document], at) for document, at in zip(documents, positions, strict=True)]


def _refuse_impossible(
    places: Sequence[tuple[int, int]], tokens: int, sampling: Sampling, shards: Shards, texts: str
) -> None:
    """Refuse a text of which tokens, at `places`, could not have been drawn.

    Where features are rounded, or were read in half precision, a token at the edge of what top-k and top-p
    keep may seem to lie outside: up to one in a hundred is taken as that.
    """
    exact = shards.info["codec"] == shards.info["target"]["dtype"] == "fp32"
    if len(places) <= (0 if exact else tokens // 100):
        return
    row, at = min(places)
    law = f"temperature {sampling.temperature:g}, top-k {sampling.top_k}, top-p {sampling.top_p:g}"
    if sampling.processors:
        law += f" and the target's own {', '.join(sampling.processors.values)}"
    raise UserError(
        f"{texts}: row {row}, position {at}: a token of probability 0 at {law} (so are {len(places)} of the "
        f"{tokens} tokens read); wanted a text written at this law; predict greedily, or on answers written "
        "with these settings"
    )


def _replayed(
    head: Head, frozen: FrozenTarget, batch: PackedBatch, shape: Shape, drafter: HeadDrafter | None
) -> tuple[AcceptanceCounts, list[Began]]:
    """Replay a chain of first choices or a tree; return its counts and its rounds."""
    room, began = batch.room.tolist(), []  # type: tuple[list[int], list[tuple[int, int]]]
    if isinstance(shape, Dynamic):
        assert drafter is not None
        guesses = shape.total_tokens - 1
        grown = tree_tables(drafter, batch, shape.top_k, shape.depth, [guesses])
        counts = replay_tree(grown, guesses, shape.depth, began)
        return counts, [(at, 1, emitted) for at, emitted in began]
    if isinstance(shape, Chain):  # first choices are enough, and faster
        hits = chain_hits(head, frozen, batch, shape.gamma)
        ranks, paths = torch.where(hits, 0, NEVER), StaticShape.chain(shape.gamma).paths
    else:
        depth, paths = max(map(len, shape.paths)), shape.paths
        ranks = tables(head, frozen, batch, depth, Sampling()).ranks
    counts = replay_paths(ranks, room, paths, began)
    return counts, [(at, 1, emitted) for at, emitted in began]


def _sort(began: Iterable[Began], batch: PackedBatch, categories: Sequence[str], by_kind: ByKind) -> None:
    """Sort the rounds of a batch whose documents have these categories."""
    before = (batch.position[batch.rows] + 2).tolist()  # tokens of the text when row t guesses x[t+2]
    document = (torch.searchsorted(batch.row_starts, batch.rows, right=True) - 1).tolist()
    room, first = batch.room.tolist(), 0
    for at, rounds, emitted in began:
        if at >= first + room[first]:  # the next answer
            first = at
        by_kind.add(categories[document[at]], at - first + 1, before[at], emitted, rounds)


def _identity(target: str, dtype: str, trust_remote_code: bool) -> dict[str, Any]:
    """Load a target for the record of its weights alone: cheap beside the features of other weights."""
    return load_target(target, dtype=dtype, trust_remote_code=trust_remote_code).identity()


def _check(config: HeadConfig, shards: Shards) -> None:
    """Refuse shards that do not hold what the head reads; let the others give no more than that."""
    features, vocabulary = shards.info["features"], int(shards.info["vocab_size"])
    if not holds_feature_of(config.kind, features):
        raise UserError(
            f"{shards.folder}: features of {features}, the head is {config.kind}; "
            f"re-run: eagle extract --for {config.kind}"
        )
    if top := shards.info.get("label_top_k"):
        refuse_top_labels(config.kind, top, str(shards.folder))
    check_window(config, int(shards.lengths.max()), str(shards.folder))
    if config.vocab_size != vocabulary:
        raise UserError(
            f"{shards.folder}: the target has {vocabulary} tokens, the head was made for "
            f"{config.vocab_size}; use shards of the head's own target"
        )
    if config.kind == "eagle3":
        shards.read_layers(config.layers_for(int(shards.info["num_layers"])), "the head")
