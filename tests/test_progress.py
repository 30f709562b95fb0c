"""Counts, times and sizes as people read them."""

from __future__ import annotations

import pytest

from eagle_train.progress import counted, parameters_text, progress, span


@pytest.mark.parametrize(
    ("said", "words"),
    [
        (counted(1, "shard"), "1 shard"),
        (counted(1200, "shard"), "1,200 shards"),
        (span(0.25), "0.25 seconds"),
        (span(1), "1 second"),
        (span(59.4), "59 seconds"),
        (span(59.6), "1.0 minutes"),
        (span(5400), "1.5 hours"),
        (parameters_text(51_200), "51,200 parameters"),
        (parameters_text(3_410_000), "3.4 M parameters"),
    ],
)
def test_one_is_no_plural_and_no_figure_is_rounded_to_nothing(said, words):
    assert said == words


@pytest.mark.parametrize(("count", "words"), [(1, "eval: 1 prompt in 0:00, "), (2, "eval: 2 prompts in ")])
def test_the_end_of_a_progress_counts_in_its_unit(count, words, capsys):
    with progress("eval", count, "prompts") as bar:
        bar.advance(count)
    assert capsys.readouterr().err.startswith(words)


def test_a_unit_without_a_plural_gets_none(capsys):
    with progress("prepare", 7, "kB") as shown:
        shown.advance(7)
    assert "prepare: 7 kB in " in capsys.readouterr().err
