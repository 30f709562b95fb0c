"""Labels as their likeliest tokens: all of them are the states' law itself, a few are near it, as bounded."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from eagle_train.config import Recipe
from eagle_train.errors import UserError
from eagle_train.evaluation.predict import predict
from eagle_train.io.tensors import load_tensors
from eagle_train.losses.top_labels import TopLabels
from eagle_train.shards.reader import open_shards
from eagle_train.targets.extract import extract
from eagle_train.training.loop import train
from eagle_train.training.metrics import read_metrics

V = 300


@pytest.fixture(scope="module")
def top_shards(tmp_path_factory, tiny_rows_dir: Path, tiny_target_dir: Path) -> Callable[..., Path]:
    """Extract the tiny rows with so many tokens a label; once each."""
    made: dict[Any, Path] = {}

    def shards(k: int, codec: str = "fp32") -> Path:
        if (k, codec) not in made:
            made[k, codec] = tmp_path_factory.mktemp("top") / f"top{k}"
            given: Any = {
                "codec": codec,
                "dtype": "fp32",
                "device": "cpu",
                "batch_tokens": 512,
                "show": False,
            }
            extract(tiny_rows_dir, tiny_target_dir, made[k, codec], label_top_k=k, **given)
        return made[k, codec]

    return shards


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("codec", ["fp32", "bf16", "fp8", "int8"])
def test_every_codec_trains_and_is_scored_in_every_precision(
    top_shards, tmp_path: Path, tiny: Callable[..., Recipe], codec: str, precision: str
) -> None:
    """Of the states that are stored, and with few labels: losses are near those in float32."""
    found = []
    for shards, settings in (
        (top_shards(V, "fp32"), "run.precision=fp32"),
        (top_shards(V, codec), f"run.precision={precision}"),
    ):
        run = tmp_path / f"run{len(found)}"
        train(shards, tiny("run.steps=2", "run.eval_every=2", settings), run, show=False)
        lines = read_metrics(run)
        assert lines[-1]["tau"] >= 1
        found.append(torch.tensor([line["loss"] for line in lines if line["step"]]))
    assert (found[0] - found[1]).abs().max() < 0.05


@pytest.mark.parametrize(
    "more",
    [
        [],
        ["loss.divergence=reverse_kl"],
        ["loss.divergence=lk"],
        ["loss.top_k_weight=1"],
        ["head.draft_vocab_size=null"],
    ],
    ids=["cross_entropy", "reverse_kl", "lk", "hass", "whole"],
)
def test_all_tokens_train_as_the_states_do(
    top_shards, tmp_path: Path, tiny: Callable[..., Recipe], tiny_shards_dir: Path, more: list[str]
) -> None:
    recipe, found = tiny("run.steps=3", "run.eval_every=3", *more), []
    for name, shards in (("states", tiny_shards_dir), ("top", top_shards(V))):
        summary = train(shards, recipe, tmp_path / name, show=False)
        losses = torch.tensor([line["loss"] for line in read_metrics(tmp_path / name) if line["step"] > 0])
        weights, _ = load_tensors(tmp_path / name / "last" / "model.safetensors")
        found.append((losses, weights, summary["tau"]))
    (losses, weights, tau), (other, others, other_tau) = found
    torch.testing.assert_close(other, losses, rtol=2e-6, atol=1e-7)
    for name, weight in weights.items():
        torch.testing.assert_close(others[name], weight, rtol=0, atol=2e-5)
    assert other_tau == tau


def test_a_few_tokens_differ_by_no_more_than_the_mass_left_out(top_shards, tiny_shards_dir: Path) -> None:
    """And by value: a naive twin, label by label and token by token."""
    draft = torch.arange(0, V, 2)
    draft_of = torch.full((V,), -1)
    draft_of[draft] = torch.arange(len(draft))
    exact, top = open_shards(tiny_shards_dir), open_shards(top_shards(8))
    worst = 0.0
    frozen = exact.frozen_target()
    for number in range(4):
        row, other = exact.read(number), top.read(number)
        assert other.label_last.shape == (len(row.label_last), 0)
        full = frozen.logits(row.label_last).log_softmax(-1)
        law = TopLabels(other.label_ids, other.label_logp, draft_of, len(draft))
        got = law.logits(torch.arange(len(full))).softmax(-1)
        for m, p in enumerate(full.exp()):
            kept = dict(zip(other.label_ids[m].tolist(), other.label_logp[m].exp().tolist(), strict=True))
            assert next(iter(kept)) == int(row.label_argmax[m]) == int(p.argmax())
            assert set(kept) == set(p.topk(8).indices.tolist())
            rest, inside = 1 - sum(kept.values()), [t for t in kept if t % 2 == 0]
            even = min(rest / (len(draft) - len(inside)), min(kept.values()))
            naive = torch.tensor([kept.get(t, even) for t in draft.tolist()])
            torch.testing.assert_close(got[m], naive / naive.sum(), rtol=1e-4, atol=1e-6)
            apart = (got[m] - p[draft] / p[draft].sum()).abs().sum() / 2
            bound = rest / (rest + sum(kept[t] for t in inside))
            assert float(apart) <= bound + 1e-6
            worst = max(worst, float(apart))
    assert worst > 0.01  # so the bound was put to the test


def test_losses_from_half_precision_are_near_those_of_the_states(
    top_shards, tmp_path: Path, tiny: Callable[..., Recipe], tiny_shards_dir: Path
) -> None:
    shards, found = top_shards(128, "bf16"), []
    row = open_shards(shards).read(0)
    assert row.label_ids is not None
    assert row.label_logp is not None
    assert (row.label_ids.dtype, row.label_logp.dtype) == (torch.int32, torch.float16)
    for name, folder in (("states", tiny_shards_dir), ("top", shards)):
        train(folder, tiny("run.steps=3"), tmp_path / name, show=False)
        lines = read_metrics(tmp_path / name)
        found.append(torch.tensor([line["loss"] for line in lines if line["step"] > 0]))
    assert not torch.equal(*found)
    torch.testing.assert_close(found[1], found[0], rtol=0.01, atol=0)


def test_what_reads_the_states_is_refused_by_name(top_shards, tmp_path: Path, tiny, tiny_rows_dir) -> None:
    shards = top_shards(8)
    medusa = ["head.kind=medusa", "head.medusa_heads=2", "head.draft_vocab_size=null"]
    refused = {
        r"holds the 8 likeliest .* in place of its state, which medusa heads read\. Re-run: eagle extract "
        r"--for medusa, without --label-top-k": medusa,
        "features of eagle3; recipe eagle3-tiny trains eagle1": ["head.kind=eagle1", medusa[2]],
        "holds the 8 likeliest .* counts loss.top_k 10 of them more. Set at most 8": ["loss.top_k_weight=1"],
    }
    for words, settings in refused.items():
        with pytest.raises(UserError, match=words):
            train(shards, tiny(*settings), tmp_path / "run", show=False)
    assert not (tmp_path / "run").exists()
    train(shards, tiny("run.steps=1"), tmp_path / "run", show=False)
    assert predict(tmp_path / "run", shards, show=False)["tau"] >= 1
    from eagle_train.decoding.sampling import Sampling

    with pytest.raises(UserError, match="--predict at a temperature needs the states"):
        predict(tmp_path / "run", shards, sampling=Sampling(1.0), show=False)
