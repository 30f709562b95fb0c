"""The plan of steps is a function of the rows and the seed; every row exactly once."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from eagle_train.errors import UserError
from eagle_train.shards import sampler
from eagle_train.shards.sampler import Plan, bins, deal

LENGTHS = st.lists(st.integers(2, 50), min_size=1, max_size=40)


def plan(lengths, seed=0, **size):
    return Plan(tuple(range(100, 100 + len(lengths))), tuple(lengths), seed, **size)


@given(LENGTHS, st.integers(0, 3), st.integers(0, 2), st.integers(1, 120))
def test_every_row_once_an_epoch_and_no_window_over_budget(lengths, seed, epoch, budget):
    of = dict(zip(range(100, 200), lengths, strict=False))
    windows = plan(lengths, seed, tokens_per_step=budget).epoch(epoch)
    assert sorted(row for rows, _ in windows for row in rows) == sorted(of)
    for rows, tokens in windows:
        assert tokens == sum(of[row] for row in rows)
        assert tokens <= budget or len(rows) == 1
    for (rows, tokens), (following, _) in itertools.pairwise(windows):
        assert rows
        assert tokens + of[following[0]] > budget, "a window closed early"


def test_windows_of_rows_keep_the_last_incomplete_one():
    windows = plan([5] * 10, rows_per_step=4).epoch(0)
    assert [len(rows) for rows, _ in windows] == [4, 4, 2]


def test_epochs_and_seeds_differ_and_repeat():
    one = plan([3] * 30, rows_per_step=5)
    assert one.epoch(0) == plan([3] * 30, rows_per_step=5).epoch(0)
    assert one.epoch(0) != one.epoch(1)
    assert one.epoch(0) != plan([3] * 30, seed=1, rows_per_step=5).epoch(0)


def test_the_order_is_fixed_for_all_time():
    assert plan([1] * 8, rows_per_step=3).epoch(0) == (
        ((104, 105, 106), 3),
        ((107, 102, 101), 3),
        ((100, 103), 2),
    )


@given(LENGTHS, st.integers(0, 60))
def test_windows_continue_from_any_step(lengths, start):
    one = plan(lengths, tokens_per_step=60)
    everything = list(itertools.islice(one.windows(), start + 3))
    assert list(itertools.islice(one.windows(start), 3)) == everything[start:]
    assert [window.step for window in everything] == list(range(start + 3))


def test_budgets_become_steps():
    one = plan([10] * 10, rows_per_step=4)  # 40, 40, 20 tokens an epoch
    assert one.num_steps(None, 7, None) == 7
    assert one.num_steps(2, None, None) == 6
    assert one.num_steps(None, None, 80) == 2
    assert one.num_steps(None, None, 81) == 3
    assert one.num_steps(None, None, 101) == 4
    assert one.num_steps(None, None, None) is None


@given(LENGTHS, st.one_of(st.integers(1, 120), st.just(2000)), st.booleans(), st.integers(1, 300))
def test_counted_steps_are_those_of_the_windows_one_by_one(lengths, size, by_rows, number):
    one = plan(lengths, **{"rows_per_step" if by_rows else "tokens_per_step": size})
    walked = list(itertools.islice(one.windows(), number))
    tokens = sum(window.tokens for window in walked)
    assert one.about_tokens(number) == tokens
    assert one.num_steps(None, None, tokens) == number
    assert one.num_steps(None, None, tokens + 1) == number + 1
    assert one.num_steps(3, None, None) == sum(len(one.epoch(epoch)) for epoch in range(3))


def test_huge_budgets_are_counted_where_epochs_are_alike_and_else_refused():
    alike, huge = plan([5] * 10, rows_per_step=4), 10**15
    assert alike.num_steps(huge, None, None) == 3 * huge
    assert alike.num_steps(None, None, 50 * huge + 21) == 3 * huge + 2
    assert alike.about_tokens(3 * huge + 1) == 50 * huge + 20
    one = plan([2, 3, 5, 7, 11] * 3, tokens_per_step=14)
    words = f"run.{{}}: got {{}}, which is {huge:,} epochs of 15 rows, wanted at most 2,173,913; set "
    with pytest.raises(UserError, match=words.format("epochs", huge)):
        one.num_steps(huge, None, None)
    with pytest.raises(UserError, match=words.format("tokens", 84 * huge + 1)):
        one.num_steps(None, None, 84 * huge + 1)


def test_the_tokens_of_very_many_steps_follow_from_the_mean(monkeypatch):
    monkeypatch.setattr(sampler, "_FEW_ROWS", 1)
    one = plan([2, 3, 5, 7, 11] * 3, tokens_per_step=14)
    exact = sum(window.tokens for window in itertools.islice(one.windows(), 3000))
    assert one.about_tokens(3000) == pytest.approx(exact, rel=0.02)


@given(LENGTHS, st.integers(1, 120), st.integers(1, 5))
def test_bins_hold_every_row_once_within_memory_and_are_dealt_once(lengths, micro, world):
    rows = list(range(len(lengths)))
    cut = bins(rows, lengths, micro, world)
    assert sorted(row for bin_ in cut for row in bin_) == rows
    assert all(sum(lengths[r] for r in bin_) <= micro or len(bin_) == 1 for bin_ in cut)
    dealt = [deal(cut, rank, world) for rank in range(world)]
    assert len({len(of_rank) for of_rank in dealt}) == 1, "processes would wait for each other"
    assert sorted(row for of_rank in dealt for bin_ in of_rank for row in bin_) == rows


def test_bins_fill_all_processes_evenly():
    cut = bins(list(range(8)), [10] * 8, 1000, world=4)
    assert [len(bin_) for bin_ in cut] == [2, 2, 2, 2]
    assert deal(bins([0], [5], 1000, 2), 1, 2) == [[]], "a row cannot be split; the other process idles"


def test_one_process_packs_as_much_as_memory_allows():
    assert bins([7, 8, 9], [10, 10, 10], 30) == [[7, 8, 9]]
    assert [len(b) for b in bins([7, 8, 9], [10, 10, 10], 20)] == [2, 1]
    assert bins([7, 8], [10, 10], 1) == [[7], [8]]


def test_a_plan_needs_exactly_one_size():
    with pytest.raises(AssertionError):
        plan([1])
