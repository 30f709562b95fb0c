"""The draft vocabulary: the most frequent supervised tokens, exactly as many as asked for."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from eagle_train.errors import UserError
from eagle_train.heads.draft_vocab import (
    choose_draft_ids,
    coverage,
    from_offsets,
    membership,
    to_draft,
    to_offsets,
)


def test_most_frequent_first_ties_by_id_filled_with_the_lowest_unused():
    frequencies = {"7": 5, "3": 2, "9": 2, "4": 1}
    assert choose_draft_ids(frequencies, 12, 2).tolist() == [3, 7]
    assert choose_draft_ids(frequencies, 12, 3).tolist() == [3, 7, 9]
    assert choose_draft_ids(frequencies, 12, 7).tolist() == [0, 1, 2, 3, 4, 7, 9]
    assert choose_draft_ids({}, 4, 4).tolist() == [0, 1, 2, 3]
    assert choose_draft_ids({5: 0}, 9, 1).tolist() == [0], "a token that never occurs is not frequent"


@given(st.dictionaries(st.integers(0, 29), st.integers(0, 4)), st.integers(1, 30))
def test_any_frequencies_give_exactly_the_size_ascending_and_a_map_that_returns(frequencies, size):
    ids = choose_draft_ids(frequencies, 30, size)
    assert len(ids) == size
    assert (ids.diff() > 0).all()
    kept, left = set(ids.tolist()), set(range(30)) - set(ids.tolist())
    assert min((frequencies.get(t, 0) for t in kept), default=0) >= max(
        (frequencies.get(t, 0) for t in left), default=0
    )
    assert torch.equal(from_offsets(to_offsets(ids), membership(ids, 30), 30, "x"), ids)
    assert to_draft(ids, 30).tolist() == [ids.tolist().index(t) if t in kept else -1 for t in range(30)]


def test_coverage_is_the_share_of_supervised_tokens():
    assert coverage(torch.tensor([1, 2]), {"1": 6, "2": 1, "5": 3}) == pytest.approx(0.7)
    assert coverage(torch.tensor([1]), {}) == 1.0


@pytest.mark.parametrize("size", [0, 31])
def test_impossible_sizes_are_refused(size):
    with pytest.raises(UserError, match="wanted 1 to the target's 30"):
        choose_draft_ids({}, 30, size)


def test_tokens_of_another_target_are_refused():
    with pytest.raises(UserError, match="token 30 occurs, but the target has 30 tokens"):
        choose_draft_ids({30: 1}, 30, 3)
