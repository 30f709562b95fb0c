"""The one place of time shifts, by value."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from eagle_train.errors import UserError
from eagle_train.shards.batches import PackedBatch, counted_rows, idle, pack


def document(length: int, spans: list[tuple[int, int]], first_id: int = 100, aux: bool = True):
    """Token t has id first_id+t; feature, label values carry the position they stand for."""
    t = torch.arange(length)
    at = torch.cat([torch.arange(s - 1, e) for s, e in spans]) if spans else torch.zeros(0, dtype=torch.long)
    return SimpleNamespace(
        input_ids=first_id + t,
        spans=spans,
        aux=(first_id + t).float()[:, None].repeat(1, 6) if aux else None,
        last_all=None if aux else (first_id + t).float()[:, None].repeat(1, 2),
        label_last=(first_id + at).float()[:, None].repeat(1, 2),
        label_argmax=first_id + at + 1,
        label_ids=None,
        label_logp=None,
    )


def test_first_and_last_counted_rows_by_value():
    batch = pack([document(5, []), document(12, [(4, 8), (10, 11)], first_id=200)], "eagle3")
    # second document starts at packed 5; answer x[4..8]: first row t=3 predicts x[5], last t=6 predicts x[8];
    # answer x[10..11]: the only row is t=9, which predicts x[11].
    assert batch.rows.tolist() == [8, 9, 10, 11, 14]
    assert batch.room.tolist() == [4, 3, 2, 1, 1]
    assert batch.label0.tolist() == [1, 2, 3, 4, 6]  # label 0 is position 3, label 5 is position 9
    assert batch.row_starts.tolist() == [0, 5, 17]
    assert batch.position.tolist() == [*range(5), *range(12)]
    assert batch.next_ids.tolist() == [101, 102, 103, 104, 0, *range(201, 212), 0]
    assert batch.input_ids[batch.rows + 2].tolist() == [205, 206, 207, 208, 211]
    assert batch.feature[batch.rows, 0].tolist() == [203, 204, 205, 206, 209]


def test_answer_of_one_token_counts_nowhere_but_keeps_its_label():
    batch = pack([document(6, [(2, 2), (3, 5)])], "eagle3")
    assert batch.rows.tolist() == [2, 3]
    assert batch.room.tolist() == [2, 1]
    assert batch.label0.tolist() == [2, 3]  # labels: position 1 | positions 2, 3, 4
    assert len(batch.label_argmax) == 4


@st.composite
def documents(draw):
    made, first = [], 1000
    for _ in range(draw(st.integers(1, 4))):
        spans, at = [], draw(st.integers(1, 3))
        for _ in range(draw(st.integers(0, 3))):
            end = at + draw(st.integers(0, 5))
            spans.append((at, end))
            at = end + 1 + draw(st.integers(0, 3))
        made.append(document(at + draw(st.integers(0, 2)), spans, first))
        first += 1000
    return made


@given(documents())
def test_rows_labels_and_counts_agree_with_the_rule(docs):
    """Twin: the counted rule of the papers, document by document, in plain Python."""
    batch = pack(docs, "eagle3")
    seen = [0] * 5
    for start, doc in zip(batch.row_starts.tolist(), docs, strict=False):
        for s, e in doc.spans:
            for t in range(len(doc.input_ids)):
                for i in range(5):
                    if t + 1 >= s and t + 2 + i <= e:
                        seen[i] += 1
                        k = batch.rows.tolist().index(start + t)
                        assert i < batch.room[k]
                        label = int(batch.label0[k]) + i
                        assert batch.label_argmax[label] == doc.input_ids[t + 1 + i] + 1  # position t+1+i
                        assert batch.input_ids[start + t + 2 + i] == doc.input_ids[t + 2 + i]
    assert seen == [int((batch.room > i).sum()) for i in range(5)]
    totals = [counted_rows(doc.spans, 5) for doc in docs]
    assert seen == [sum(column) for column in zip(*totals, strict=True)]


def test_kind_chooses_the_feature_and_a_missing_one_is_refused():
    assert pack([document(4, [(1, 3)], aux=False)], "eagle1").feature.shape == (4, 2)
    with pytest.raises(UserError, match="re-run: eagle extract --for eagle1"):
        pack([document(4, [(1, 3)])], "eagle1")
    with pytest.raises(UserError, match="re-run: eagle extract --for eagle3"):
        pack([document(4, [(1, 3)], aux=False)], "eagle3")


def test_idle_batch_has_the_shapes_and_counts_nothing():
    batch = idle(pack([document(9, [(3, 7)])], "eagle3"))
    assert (batch.num_tokens, len(batch.row_starts), len(batch.rows)) == (1, 2, 0)
    assert batch.feature.shape == (1, 6)
    assert batch.label_last.shape == (0, 2)


def test_to_keeps_every_field():
    batch = pack([document(9, [(3, 7)])], "eagle3")
    few = len(batch.label_argmax)
    batch = replace(batch, label_ids=torch.ones(few, 2), label_logp=torch.zeros(few, 2))
    moved = batch.to("cpu")
    assert isinstance(moved, PackedBatch)
    assert all(torch.equal(getattr(batch, name), getattr(moved, name)) for name in vars(batch))
