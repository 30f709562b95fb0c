"""Held-out rows by conversation; acceptance over them whatever their packing."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from eagle_train.shards.reader import open_shards
from eagle_train.training import build
from eagle_train.training.held_out import predict_chain, split
from eagle_train.training.loader import Loader

IDS = st.lists(st.integers(0, 30).map(str), min_size=1, max_size=80)


@given(IDS, st.one_of(st.floats(0, 0.99), st.integers(0, 20).map(float)))
def test_all_rows_of_a_conversation_are_on_one_side(ids, held_out):
    train, held = split(ids, held_out)
    assert sorted(train + held) == list(range(len(ids)))
    assert not {ids[row] for row in train} & {ids[row] for row in held}
    conversations = len(set(ids))
    number = len({ids[row] for row in held})
    if held_out >= 1 or held_out == 0:
        assert number == min(int(held_out), conversations)
    else:
        assert number == max(1, round(held_out * conversations))


@given(IDS, st.randoms(use_true_random=False))
def test_the_choice_depends_on_ids_alone(ids, random):
    held = {ids[row] for row in split(ids, 3.0)[1]}
    shuffled = random.sample(ids, len(ids))
    assert {shuffled[row] for row in split(shuffled, 3.0)[1]} == held


def test_rounds_are_pooled_over_prompts_whatever_the_packing(tiny, tiny_shards_dir):
    shards = open_shards(tiny_shards_dir)
    frozen = shards.frozen_target()
    head = build.new_head(tiny(), shards, frozen)
    rows = list(range(shards.num_rows))
    found = [
        predict_chain(head, frozen, Loader(shards, "eagle3", 3, micro).evaluation(rows), 3)
        for micro in (10**9, 300, 1)
    ]
    assert found[0] == found[1] == found[2]
    shares = [
        predict_chain(head, frozen, Loader(shards, "eagle3", 3, 300, rank, 2).evaluation(rows), 3)
        for rank in range(2)
    ]
    assert shares[0] + shares[1] == found[0]
    assert found[0].tokens == sum(max(0, e - s) for spans in shards.spans for s, e in spans)
    assert predict_chain(head, frozen, [], 3).tau == 1.0
