"""Reading ahead keeps the order, hands errors on, and stops when told."""

from __future__ import annotations

import itertools
import threading

import pytest
import torch

from eagle_train.shards.reader import Shards, open_shards
from eagle_train.shards.sampler import Window
from eagle_train.training.engine import Engine
from eagle_train.training.loader import Loader, ReadAhead


def test_items_arrive_in_order_and_end():
    ahead = ReadAhead(iter(range(20)), depth=3)
    assert list(ahead) == list(range(20))
    assert list(ahead) == []


def test_an_error_arrives_where_its_item_would_have():
    def items():
        yield 1
        raise OSError("gone")

    ahead = ReadAhead(items())
    assert next(ahead) == 1
    with pytest.raises(OSError, match="gone"):
        next(ahead)


def test_close_ends_the_thread_of_an_endless_iterator():
    before = threading.active_count()
    ahead = ReadAhead(itertools.count())
    assert next(ahead) == 0
    ahead.close()
    assert threading.active_count() == before


def test_items_are_made_before_they_are_asked_for_and_no_more_than_the_depth():
    made, full = [], threading.Event()

    def items():
        for i in itertools.count():
            made.append(i)
            if i == 3:  # three wait in the queue, one in the hand
                full.set()
            yield i

    ahead = ReadAhead(items(), depth=3)
    assert full.wait(60), "nothing was asked for, so nothing was made"
    assert made == [0, 1, 2, 3]
    assert [next(ahead) for _ in range(9)] == list(range(9))
    ahead.close()


def test_a_run_reads_its_rows_beside_the_arithmetic(train_tiny, monkeypatch):
    reading, computing = set(), set()
    read, accumulate = Shards.read, Engine.accumulate
    here = threading.get_ident
    monkeypatch.setattr(Shards, "read", lambda self, row: reading.add(here()) or read(self, row))
    monkeypatch.setattr(
        Engine, "accumulate", lambda self, *given: computing.add(here()) or accumulate(self, *given)
    )
    train_tiny("run", "data.held_out=0", "run.steps=2")
    assert computing == {here()}
    assert len(reading) == 1
    assert not reading & computing


def test_where_asked_every_tensor_of_a_batch_is_page_locked(tiny_shards_dir, monkeypatch):
    locked = []
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda self: locked.append(self.clone()) or locked[-1])
    shards = open_shards(tiny_shards_dir)
    window = Window(0, 0, (0, 1), int(shards.lengths[:2].sum()))
    (micro,) = Loader(shards, "eagle3", 3, 9999, pinned=True).training([window])
    tensors = [value for value in vars(micro.batch).values() if value is not None]
    assert {id(tensor) for tensor in tensors} == {id(tensor) for tensor in locked}
    assert len(tensors) == 10
    next(Loader(shards, "eagle3", 3, 9999).training([window]))
    assert len(locked) == 10
