"""The plan: every row once, batches within budget, a function of the rows alone."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from eagle_train.errors import UserError
from eagle_train.shards.plan import RowTable, default_shard_tokens, label_positions, make_batches, make_plan
from eagle_train.shards.schema import Plan, Setting
from eagle_train.shards.sizes import file_size

SETTING = Setting(
    rows_fingerprint="r",
    tokenizer_fingerprint="t",
    target={"name": "tiny", "revision": None, "fingerprint": "f", "dtype": "fp32"},
    features="eagle3",
    layer_ids=(2, 4, 5),
    codec="bf16",
    hidden_size=8,
    vocab_size=300,
    num_layers=8,
    device="cpu",
    threads=1,
    batch_tokens=64,
    shard_tokens=128,
)


def _table(lengths: list[int]) -> RowTable:
    return RowTable(
        np.array(lengths, dtype=np.int64),
        [[(1, n - 1)] if n > 1 else [] for n in lengths],
        [f"row-{i}" for i in range(len(lengths))],
        [f"c{i // 2}" for i in range(len(lengths))],
    )


@given(st.lists(st.integers(1, 200), min_size=1, max_size=80), st.integers(1, 300), st.integers(1, 500))
def test_every_row_lies_in_exactly_one_batch_of_one_shard(
    lengths: list[int], batch_tokens: int, shard_tokens: int
) -> None:
    plan = make_plan(_table(lengths), replace(SETTING, batch_tokens=batch_tokens, shard_tokens=shard_tokens))
    rows = [row for shard in plan.shards for row in shard.rows]
    assert sorted(rows) == list(range(len(lengths)))
    assert all(shard.rows for shard in plan.shards)
    assert plan.tokens == sum(lengths)
    assert plan.labels == sum(n - 1 for n in lengths)


@given(st.lists(st.integers(1, 200), min_size=1, max_size=80), st.integers(1, 300))
def test_a_batch_holds_its_budget_of_padded_tokens_or_one_row(lengths: list[int], budget: int) -> None:
    for batch in make_batches(np.array(lengths), budget):
        padded = len(batch) * max(lengths[row] for row in batch)
        assert padded <= budget or len(batch) == 1


def test_longest_rows_come_first_and_ties_keep_the_order_of_the_rows() -> None:
    assert make_batches(np.array([3, 9, 3, 9, 5]), 18) == [(1, 3), (4, 0, 2)]


def test_shards_hold_about_as_many_tokens_each() -> None:
    lengths = np.random.default_rng(0).integers(20, 400, size=800).tolist()
    plan = make_plan(_table(lengths), replace(SETTING, batch_tokens=1024, shard_tokens=8192))
    sizes = [shard.tokens for shard in plan.shards]
    assert min(sizes) > 0.8 * max(sizes)


def test_shards_are_many_enough_to_share_out_and_never_large() -> None:
    assert default_shard_tokens(130_000, 4096) == 8125
    assert default_shard_tokens(10**9, 4096) == 32_768
    assert default_shard_tokens(1000, 4096) == 4096


def test_label_positions_are_those_whose_next_token_is_supervised() -> None:
    assert label_positions([(3, 5), (8, 8)]).tolist() == [2, 3, 4, 7]
    assert label_positions([]).tolist() == []


def test_a_plan_reads_back_as_it_was_written(tmp_path: Path) -> None:
    plan = make_plan(_table([10, 40, 7, 90]), SETTING)
    assert plan.create(tmp_path)
    again = Plan.load(tmp_path)
    assert again == plan
    assert again.identity == plan.identity


def test_the_size_is_that_of_the_tensors() -> None:
    plan = make_plan(_table([10, 6]), SETTING)
    tokens, labels = 16, 14
    bf16, int64 = 2, 8
    expected = tokens * (4 + 1 + 3 * 8 * bf16) + labels * (8 * bf16 + 4 + 4)
    expected += int64 * (2 + 3 + 2 * 2 + 3)  # rows, row_starts, spans, span_starts
    assert plan.size == expected


@pytest.mark.parametrize("codec", ["fp8", "int8"])
def test_eight_bits_at_hidden_4096_take_at_most_15_and_a_half_kib_a_token(codec: str) -> None:
    setting = replace(SETTING, codec=codec, hidden_size=4096, batch_tokens=4000, shard_tokens=32_000)
    table = RowTable(
        np.full(40, 1000, dtype=np.int64),
        [[(200, 599), (600, 999)]] * 40,
        [f"row-{i}" for i in range(40)],
        ["c"] * 40,
    )
    plan = make_plan(table, setting)
    assert plan.labels == 0.8 * plan.tokens
    tensors = plan.size
    files = sum(file_size(plan, number, table) for number in range(len(plan.shards)))
    assert tensors < files
    assert files / plan.tokens / 1024 <= 15.5
    assert make_plan(table, replace(setting, codec="bf16")).size / plan.tokens / 1024 > 30


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"layer_ids": (1, 4, 5)}, ["layers (2, 4, 5)", "this run has (1, 4, 5)"]),
        ({"codec": "fp32"}, ["codec bf16", "this run has fp32"]),
        ({"rows_fingerprint": "other"}, ["rows r", "this run has other"]),
        ({"features": "eagle1"}, ["--for eagle3", "this run has eagle1"]),
        ({"batch_tokens": 99}, ["batch tokens 64", "this run has 99"]),
        (
            {"target": {"name": "big", "revision": None, "fingerprint": "g", "dtype": "fp32"}},
            ["target tiny (f)", "this run has big (g)"],
        ),
        (
            {"target": {**SETTING.target, "dtype": "bf16"}},
            ["dtype fp32", "this run has bf16"],
        ),
    ],
)
def test_another_setting_is_refused_naming_both(change: dict, words: list[str]) -> None:
    with pytest.raises(UserError) as caught:
        SETTING.refuse_other(replace(SETTING, **change), Path("shards"))
    assert all(word in str(caught.value) for word in words)


def test_the_same_target_under_another_name_is_accepted() -> None:
    SETTING.refuse_other(replace(SETTING, target={**SETTING.target, "name": "./tiny"}), Path("shards"))


def test_the_first_plan_in_a_folder_stays(tmp_path: Path) -> None:
    first, second = make_plan(_table([10, 40]), SETTING), make_plan(_table([10, 41]), SETTING)
    assert first.create(tmp_path)
    assert not second.create(tmp_path)
    assert Plan.load(tmp_path) == first


@pytest.mark.parametrize(
    ("path", "value", "words"),
    [
        (["format_version"], 99, "format version 99, wanted 1"),
        (["setting", "codec"], None, "codec: None"),
        (["setting", "layer_ids"], "2,4", "'2', wanted a whole number"),
        (["setting", "layer_ids"], 2, "not iterable"),
        (["setting", "target"], {"name": "tiny"}, "target dtype' is missing"),
        (["setting", "extra"], 1, "unexpected keyword argument 'extra'"),
        (["num_rows"], "four", "damaged or edited"),
        (["shards"], {}, "do not hold every row once"),
        (["shards", 0], 7, "damaged or edited"),
        (["shards", 0, "bytes"], "many", "'many', wanted a whole number"),
        (["shards", 0, "batches"], [[0, 0]], "do not hold every row once"),
    ],
)
def test_an_edited_plan_is_named_in_one_line(
    tmp_path: Path, path: list[str | int], value: Any, words: str
) -> None:
    make_plan(_table([10, 40, 7, 90]), SETTING).create(tmp_path)
    record = place = json.loads((tmp_path / "plan.json").read_text())
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    (tmp_path / "plan.json").write_text(json.dumps(record))
    with pytest.raises(UserError) as caught:
        Plan.load(tmp_path)
    assert str(caught.value).startswith(f"{tmp_path / 'plan.json'}: ")
    assert words in str(caught.value)
