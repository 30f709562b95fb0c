"""How a window is cut into forwards changes nothing: accumulation, packing, noise, empty batches."""

from __future__ import annotations

import pytest
import torch

from eagle_train.shards.batches import counted_rows, pack
from eagle_train.shards.reader import open_shards
from eagle_train.shards.sampler import Plan
from eagle_train.training.checkpoints import folder_of, read_head
from eagle_train.training.eagle3_step import Eagle3Step
from eagle_train.training.held_out import split
from eagle_train.training.loader import Loader
from eagle_train.training.metrics import read_metrics

# With a large epsilon AdamW's step is smooth in the gradient, so that weights can be compared at 1e-6;
# otherwise it is its sign, and a gradient of 1e-12 decides.
# Clipping would hide a wrong scale of the gradient.
SMOOTH = ["optim.eps=1.0", "optim.lr=0.3", "optim.clip_norm=0", "run.steps=5", "schedule.warmup_steps=0"]


@pytest.mark.parametrize("kind", ["eagle3", "eagle1"])
def test_accumulation_and_packing_change_no_loss_and_no_weight(kind, tmp_path, train_tiny, weights):
    """One forward a window, about four, and one a row: unpacked."""
    common = [*SMOOTH, "data.rows_per_step=6"]
    runs = {}
    for micro in (100_000, 250, 1):
        train_tiny(f"micro{micro}", *common, f"data.micro_tokens={micro}", kind=kind)
        out = tmp_path / f"micro{micro}"
        runs[micro] = weights(out / "last"), read_metrics(out)
    whole, lines = runs[100_000]
    train_tiny("start", *common, "run.steps=1", "optim.lr=1e-30", kind=kind)
    start = weights(tmp_path / "start" / "last")
    moved = max(
        (whole[n] - x).abs().max() for n, x in start.items() if "/" not in n and x.is_floating_point()
    )
    assert moved > 1e-3, "the weights hardly moved, so equality means nothing"
    for micro in (250, 1):
        other, other_lines = runs[micro]
        for name, value in whole.items():
            torch.testing.assert_close(
                other[name], value, rtol=0, atol=1e-6, msg=lambda m, n=name: f"{n}: {m}"
            )
        for one, two in zip(lines, other_lines, strict=True):
            assert two.get("tau") == one.get("tau")
            for key in ("loss", "accuracy"):
                assert two.get(key) == pytest.approx(one.get(key), abs=2e-6)


def test_the_last_incomplete_window_is_a_step_of_full_weight(tmp_path, train_tiny, weights, tiny_shards_dir):
    """Its gradient is the mean over its own few rows, as if no step had more."""
    every = ["run.save_every=1", "run.keep_last=9", "run.eval_every=99"]
    train_tiny("run", *SMOOTH, *every, "data.rows_per_step=5")
    shards = open_shards(tiny_shards_dir)
    rows = tuple(split(shards.conversation_ids, 2.0)[0])
    plan = Plan(rows, tuple(int(shards.lengths[row]) for row in rows), 0, rows_per_step=5)
    window = next(plan.windows(4))
    assert (len(window.rows), next(plan.windows(5)).epoch) == (2, 1)
    head = read_head(folder_of(tmp_path / "run", 4))
    counts = torch.tensor([counted_rows(shards.spans[row], 3) for row in window.rows]).sum(0)
    batch = pack([shards.read(row) for row in window.rows], "eagle3")
    Eagle3Step(head, shards.frozen_target(), num_steps=3)(batch, counts).loss.backward()
    before, after = (weights(folder_of(tmp_path / "run", step)) for step in (4, 5))
    for name, parameter in head.named_parameters():
        key = f"{name}/exp_avg"  # 0.9 of the one before and 0.1 of the gradient
        taken = (after[key] - 0.9 * before[key]) / 0.1
        assert (taken - parameter.grad).abs().max() < 1e-5 * max(1e-3, parameter.grad.abs().max()), name


def test_every_row_of_an_epoch_is_run_exactly_once_with_the_windows_counts(tiny_shards_dir):
    shards = open_shards(tiny_shards_dir)
    rows = tuple(range(shards.num_rows))
    plan = Plan(rows, tuple(shards.lengths.tolist()), 0, rows_per_step=5)
    windows = _first_epoch(plan)
    seen, counted = 0, torch.zeros(3, dtype=torch.int64)
    for rank in range(2):
        loader = Loader(shards, "eagle3", 3, micro_tokens=200, rank=rank, world=2)
        micros = list(loader.training(windows))
        assert sum(micro.closes for micro in micros) == len(windows)
        for micro in micros:
            batch = micro.batch
            seen += sum(1 for n in batch.row_starts.diff().tolist() if n > 1)
            counted += torch.tensor([int((batch.room > i).sum()) for i in range(3)])
    assert seen == shards.num_rows
    loader = Loader(shards, "eagle3", 3, micro_tokens=10**9)
    totals = [micro.counts for micro in loader.training(windows)]
    assert torch.equal(torch.stack(totals).sum(0), counted)


def test_processes_get_equally_many_micro_batches_and_the_missing_ones_count_nothing(tiny_shards_dir):
    shards = open_shards(tiny_shards_dir)
    plan = Plan((3,), (int(shards.lengths[3]),), 0, rows_per_step=1)  # fewer rows than processes
    dealt = [
        list(Loader(shards, "eagle3", 3, 4096, rank, 3).training(_first_epoch(plan))) for rank in range(3)
    ]
    assert [len(micros) for micros in dealt] == [1, 1, 1]
    assert [len(micros[0].batch.rows) > 0 for micros in dealt] == [True, False, False]
    assert len({tuple(micros[0].counts.tolist()) for micros in dealt}) == 1


def test_noise_belongs_to_a_row_and_an_epoch_not_to_a_batch(tiny_shards_eagle1_dir):
    shards = open_shards(tiny_shards_eagle1_dir)

    def features(order, epoch, micro):
        plan = Plan(tuple(order), tuple(int(shards.lengths[r]) for r in order), 0, rows_per_step=2)
        loader = Loader(shards, "eagle1", 1, micro, noise=0.1, seed=0)
        found = {}
        for m in loader.training(_windows(plan, epoch)):
            for start, end in zip(m.batch.row_starts[:-1], m.batch.row_starts[1:], strict=True):
                found[tuple(m.batch.input_ids[start:end].tolist())] = m.batch.feature[start:end]
        return found

    packed, alone, later = features([0, 1], 0, 9999), features([1, 0], 0, 1), features([0, 1], 1, 9999)
    for ids in packed:
        assert torch.equal(packed[ids], alone[ids])
        assert not torch.equal(packed[ids], later[ids])
    plain = next(Loader(shards, "eagle1", 1, 9999, noise=0.1).evaluation([0]))
    row = shards.read(0)
    assert torch.equal(plain.feature, row.last_all), "noise is for training only"
    difference = packed[tuple(row.input_ids.tolist())] - row.last_all
    bound = 0.1 * 512 / len(row.input_ids)
    assert 0.95 * bound < difference.abs().max() <= bound * 1.001


def _first_epoch(plan):
    return _windows(plan, 0)


def _windows(plan, epoch):
    return [w for w, _ in zip(plan.windows(), range(99), strict=False) if w.epoch == epoch]
