"""Training without shards takes the steps that training from shards takes."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from eagle_cli.main import main
from eagle_train.errors import UserError
from eagle_train.io.text import read_json
from eagle_train.recipe_files import load_recipe
from eagle_train.shards.reader import open_shards
from eagle_train.targets import online
from eagle_train.targets.load import load_target
from eagle_train.targets.online import OnlineRows
from eagle_train.targets.survey import survey
from eagle_train.training.loader import Loader
from eagle_train.training.loop import train
from eagle_train.training.metrics import read_metrics
from eagle_train.training.source import LiveTarget

# A large epsilon makes AdamW smooth in the gradient; else its sign decides, however small it is.
SMOOTH = ["optim.eps=1.0", "optim.lr=0.3", "optim.clip_norm=0", "schedule.warmup_steps=0"]
OF_KIND = {"eagle3": [], "eagle1": ["head.kind=eagle1", "head.draft_vocab_size=null", "loss.noise=0.2"]}
OF_KIND["medusa"] = ["head.kind=medusa", "head.medusa_heads=2", "head.draft_vocab_size=null"]


def figures(run: Path) -> list[tuple]:
    return [(line["step"], line["tokens"], line.get("loss"), line.get("tau")) for line in read_metrics(run)]


@pytest.fixture
def open_online(tiny_rows_dir, tiny_target_dir) -> Callable[..., OnlineRows]:
    def opened(**settings: Any) -> OnlineRows:
        work = survey(tiny_rows_dir, str(tiny_target_dir), None, device="cpu", **settings)
        return OnlineRows(tiny_rows_dir, work, load_target(tiny_target_dir, dtype=work.dtype, device="cpu"))

    return opened


@pytest.mark.parametrize("kind", list(OF_KIND))
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_online_training_is_that_from_shards_bit_by_bit_where_the_target_runs_row_by_row(
    kind, precision, tmp_path, row_by_row, tiny_rows_dir, tiny_target_dir, weights
):
    """In bf16 too: the target's arithmetic is its own, whatever training's is; two epochs, held-out rows."""
    changes = [*OF_KIND[kind], f"run.precision={precision}", "data.tokens_per_step=900", "run.steps=7"]
    recipe = load_recipe("eagle3-tiny", changes)
    live = LiveTarget(str(tiny_target_dir), "fp32", batch_tokens=1)
    summaries = [
        train(row_by_row(kind), recipe, tmp_path / "shards", show=False),
        train(tiny_rows_dir, recipe, tmp_path / "online", live=live, show=False),
    ]
    assert figures(tmp_path / "shards") == figures(tmp_path / "online")
    stored, computed = (weights(tmp_path / run / "last") for run in ("shards", "online"))
    assert stored.keys() == computed.keys()
    assert all(torch.equal(stored[name], computed[name]) for name in stored)
    own = {"out", "head", "seconds"}
    first, second = ({k: v for k, v in one.items() if k not in own} for one in summaries)
    assert first == second


def test_batches_of_the_target_move_nothing_but_the_last_bits(
    tmp_path, tiny_shards_dir, tiny_rows_dir, tiny_target_dir, tiny, weights
):
    recipe = tiny(*SMOOTH, "data.rows_per_step=3", "data.micro_tokens=400")
    train(tiny_shards_dir, recipe, tmp_path / "shards", show=False)
    train(tiny_rows_dir, recipe, tmp_path / "online", live=LiveTarget(str(tiny_target_dir)), show=False)
    for one, other in zip(figures(tmp_path / "shards"), figures(tmp_path / "online"), strict=True):
        assert one[:2] == other[:2]
        assert one[2] == pytest.approx(other[2], abs=1e-6)
        assert one[3] == other[3]
    stored, computed = (weights(tmp_path / run / "last") for run in ("shards", "online"))
    for name in stored:
        torch.testing.assert_close(stored[name], computed[name], rtol=0, atol=1e-6)


def test_a_run_interrupted_twice_ends_in_the_same_weights(
    tmp_path, tiny_rows_dir, tiny_target_dir, tiny, weights, interrupt_after
):
    recipe, live = tiny("run.steps=6"), LiveTarget(str(tiny_target_dir))
    train(tiny_rows_dir, recipe, tmp_path / "whole", live=live, show=False)
    for steps in (3, 1):
        interrupt_after(steps)
        with pytest.raises(KeyboardInterrupt):
            train(tiny_rows_dir, recipe, tmp_path / "broken", live=live, show=False)
    interrupt_after(-1)
    train(tiny_rows_dir, recipe, tmp_path / "broken", live=live, show=False)
    assert figures(tmp_path / "whole") == figures(tmp_path / "broken")
    whole, broken = (weights(tmp_path / run / "last") for run in ("whole", "broken"))
    assert all(torch.equal(whole[name], broken[name]) for name in whole)


def test_the_source_says_what_shards_say(open_online, tiny_shards_dir):
    source, shards = open_online(), open_shards(tiny_shards_dir)
    assert source.supervised_frequencies == shards.supervised_frequencies
    assert (source.spans, source.conversation_ids) == (shards.spans, shards.conversation_ids)
    assert source.lengths.tolist() == shards.lengths.tolist()
    for name in ("features", "layer_ids", "hidden_size", "vocab_size", "num_layers", "target", "num_rows"):
        assert source.info[name] == shards.info[name], name
    rows = [5, 0, 17, 5]
    for row, found in zip(rows, source.read_rows(rows), strict=True):
        wanted = shards.read(row)
        for field in dataclasses.fields(wanted):
            one, other = getattr(found, field.name), getattr(wanted, field.name)
            if isinstance(other, torch.Tensor):
                assert one.dtype == other.dtype, field.name
                torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)
            else:
                assert one == other, field.name


@pytest.mark.parametrize(("free", "words", "runs"), [(1 << 30, "kept in memory", 1), (64, "computed at", 2)])
def test_held_out_rows_are_computed_once_where_memory_allows(free, words, runs, open_online, monkeypatch):
    monkeypatch.setattr(online, "free_memory", lambda: free)
    source, held_out = open_online(), [3, 9]
    assert words in source.keep(held_out)
    forwards, run = [], online.run_batch

    def counting(tap, batch):
        forwards.append(batch.rows)
        return run(tap, batch)

    monkeypatch.setattr(online, "run_batch", counting)
    seen = [list(Loader(source, "eagle3", 3, 9999).evaluation(held_out)) for _ in range(2)]
    assert len(forwards) == runs
    for one, other in zip(*seen, strict=True):
        assert torch.equal(one.feature, other.feature)
        assert torch.equal(one.label_last, other.label_last)


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_states_come_in_the_targets_dtype(dtype, open_online):
    """16-bit floats that training has no arithmetic for are widened."""
    source = open_online(dtype=dtype)
    (batch,) = Loader(source, "eagle3", 3, 9999).evaluation([0, 1])
    assert source.info["target"]["dtype"] == dtype
    assert batch.feature.dtype == batch.label_last.dtype == {"bf16": torch.bfloat16}.get(dtype, torch.float32)


def test_a_row_that_is_not_finite_skips_its_step(tmp_path, tiny_rows_dir, tiny_target_dir, tiny, monkeypatch):
    read = OnlineRows.read_rows

    def reading(self, rows):
        return [
            dataclasses.replace(found, aux=found.aux * float("nan")) if row == 5 else found
            for row, found in zip(rows, read(self, rows), strict=True)
        ]

    monkeypatch.setattr(OnlineRows, "read_rows", reading)
    recipe = tiny("run.steps=null", "run.epochs=1", "data.held_out=0", "data.tokens_per_step=600")
    live = LiveTarget(str(tiny_target_dir))
    assert train(tiny_rows_dir, recipe, tmp_path / "run", live=live, show=False)["skipped"] == 1


def test_another_target_cannot_go_on_and_nothing_of_the_disk_is_used(
    tmp_path, tiny_rows_dir, tiny_target_dir, tiny, make_tiny_target
):
    run, recipe = tmp_path / "run", tiny("run.steps=2")
    train(tiny_rows_dir, recipe, run, live=LiveTarget(str(tiny_target_dir)), show=False)
    assert not list(run.rglob("shard-*"))
    record = read_json(run / "run.json", "")
    assert record["shards"].startswith("online-")
    assert record["rows_fingerprint"]
    other = make_tiny_target(tmp_path / "other", seed=1)
    for live in (LiveTarget(str(other)), LiveTarget(str(tiny_target_dir), "bf16")):
        with pytest.raises(UserError, match="trained on other shards or rows"):
            train(tiny_rows_dir, recipe, run, live=live, show=False)


@pytest.mark.parametrize(
    ("place", "words", "message"),
    [
        ("rows", ["--online"], "needs the rows' target; give --target T"),
        ("shards", ["--online", "--target", "T"], "holds shards, wanted the rows that eagle prepare made"),
        ("shards", ["--target", "T"], "without --online or --max-disk, so --target has no"),
        ("shards", ["--batch-tokens", "9"], "so --batch-tokens has no meaning; leave it out"),
        ("rows", [], "prepared rows; run eagle extract on them, or train with --online --target T"),
        ("nothing", ["--online", "--target", "T"], "make the rows with: eagle prepare"),
    ],
)
def test_what_cannot_be_is_refused_in_one_line(
    place, words, message, tmp_path, tiny_rows_dir, tiny_shards_dir, tiny_target_dir, capsys
):
    folder = {"rows": tiny_rows_dir, "shards": tiny_shards_dir, "nothing": tmp_path / "nothing"}[place]
    words = [str(tiny_target_dir) if word == "T" else word for word in words]
    with pytest.raises(SystemExit) as caught:
        main(["train", str(folder), "--recipe", "eagle3-tiny", "--out", str(tmp_path / "run"), *words])
    err = capsys.readouterr().err
    assert caught.value.code == 2
    assert err.count("\n") == 1, err
    assert message in err
    assert not (tmp_path / "run").exists()


def test_the_command_says_where_features_come_from_and_rehearses_likewise(
    tmp_path, tiny_rows_dir, tiny_target_dir, capsys
):
    words = ["train", tiny_rows_dir, "--online", "--target", tiny_target_dir, "--recipe", "eagle3-tiny"]
    words += ["--out", tmp_path / "run", "--set", "run.steps=2"]
    for more in (["--dry-run"], []):
        with pytest.raises(SystemExit) as caught:
            main([str(word) for word in [*words, *more]])
        out, err = capsys.readouterr()
        assert caught.value.code == 0, err
        assert (tmp_path / "run").exists() is not bool(more)
    assert "in fp32, as training goes on; those of 2 held-out rows" in err
    assert f"next: eagle eval {tmp_path / 'run'} --target {tiny_target_dir}" in out
