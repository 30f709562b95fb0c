"""What is kept of a record that is left out, and of its category."""

from __future__ import annotations

from typing import Any

import pytest

from eagle_train.data.conversations import read_prompts, read_record
from eagle_train.data.records import Skip, Skipped

from .spoken import A, read


def test_reasons_are_few_and_keep_a_few_examples() -> None:
    skipped = Skipped()
    for number in range(1000):
        with pytest.raises(Skip) as caught:
            read({"messages": [{"role": f"alien {number} " + "x" * 500, "content": "Hi"}, A]})
        skipped.add(caught.value.kind, f"file#{number}", caught.value.detail)
    assert skipped.by_count() == {"unknown role": 1000}
    (named,) = skipped.examples.values()
    assert [text.split(":")[0] for text in named] == ["file#0", "file#1", "file#2"]
    assert max(map(len, named)) <= 120
    both = skipped + skipped
    assert both.by_count() == {"unknown role": 2000}
    assert both.examples == skipped.examples


@pytest.mark.parametrize(
    ("given", "kept"),
    [
        *[("sea", "sea"), (3, "3"), ("\ud800?", "??"), ("Meer und M\u00f6we", "Meer und M\u00f6we")],
        *[(none, "") for none in (None, KeyError, True, 0.5, {"a": 1}, ["a"], " \n\x1b")],
        (" a\nb\x1b[31m\t\u2028 c\x00", "a b [31m c"),
        ("x" * 80, "x" * 80),
        ("x" * 81, "x" * 79 + "\u2026"),
    ],
)
def test_a_category_is_kept_as_a_short_line_and_makes_no_record_bad(given: Any, kept: str) -> None:
    named = {} if given is KeyError else {"category": given}
    turns = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]
    token_row = {"input_ids": [5, 6], "loss_mask": [0, 1]}
    for record in ({"messages": turns}, token_row):
        assert read_record({**record, **named}, "file#1").category == kept
    assert read_prompts({"turns": ["Hi"], **named}, "file#1").category == kept
