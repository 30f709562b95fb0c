"""Reading ahead keeps the order, hands errors on, and stops when told."""

from __future__ import annotations

import itertools
import threading

import pytest

from eagle_train.training.loader import ReadAhead


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
