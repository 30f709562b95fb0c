"""Records that come with their tokens are taken as they are, or refused."""

from __future__ import annotations

from typing import Any

import pytest

from eagle_train.data.conversations import read_record
from eagle_train.data.records import Skip, TokenRow
from eagle_train.data.token_rows import spans_of


def test_token_rows_are_taken_as_they_are() -> None:
    found = read_record({"input_ids": [5, 6, 7, 8, 9], "loss_mask": [0, 1, 1, 0, 1]}, "file#1")
    assert isinstance(found, TokenRow)
    assert found.input_ids == (5, 6, 7, 8, 9)
    assert found.spans == ((1, 2), (4, 4))
    two = read_record(
        {
            "input_ids": [5, 6, 7, 8],
            "loss_mask": [0, 1, 1, 1],
            "spans": [[1, 1], [2, 3]],
            "conversation_id": 4,
        },
        "file#1",
    )
    assert isinstance(two, TokenRow)
    assert (two.spans, two.conversation_id) == (((1, 1), (2, 3)), "4")


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"loss_mask": [0, 0, 0]}, "supervises nothing"),
        ({"loss_mask": [1, 1, 1]}, "supervises the first token"),
        ({"loss_mask": [0, 1]}, "one per token"),
        ({"loss_mask": [0, 2, 0]}, "one per token"),
        ({}, "one per token"),
        ({"loss_mask": [0, 1, 1], "spans": [[1, 1]]}, "disagree"),
        ({"loss_mask": [0, 1, 1], "spans": [[2, 1]]}, "not in order"),
        ({"loss_mask": [0, 1, 1], "spans": [[1, 2], [1, 2]]}, "not in order"),
        ({"loss_mask": [0, 1, 1], "spans": [[2, 2], [1, 1]]}, "not in order"),
        ({"loss_mask": [0, 1, 1], "spans": [[1, 10**12]]}, "outside the row"),
        ({"loss_mask": [0, 1, 1], "spans": [[-2, 2]]}, "not in order"),
        *(
            ({"loss_mask": [0, 1, 1], "spans": spans}, "not pairs")
            for spans in (7, "1,2", {"a": 1}, [7], [None], [[1]], [[1, 2, 2]], [["1", "2"]], [[True, 2]])
        ),
        ({"input_ids": [], "loss_mask": []}, "input_ids is not"),
        ({"input_ids": [1, "a", 2], "loss_mask": [0, 1, 1]}, "input_ids is not"),
        ({"input_ids": [1, -2, 2], "loss_mask": [0, 1, 1]}, "input_ids is not"),
        ({"input_ids": [1, 2**31, 2], "loss_mask": [0, 1, 1]}, "input_ids is not"),
    ],
)
def test_token_rows_that_train_on_nothing_or_everything_are_refused(fields: Any, reason: str) -> None:
    with pytest.raises(Skip, match=reason):
        read_record({"input_ids": [5, 6, 7], **fields}, "file#1")


def test_spans_of() -> None:
    assert spans_of([]) == []
    assert spans_of([0, 1, 1, 0, 1]) == [(1, 2), (4, 4)]
