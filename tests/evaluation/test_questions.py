"""Question files: every fault is one line with its place."""

import pytest

from eagle_train.errors import UserError
from eagle_train.evaluation.questions import read_questions


def test_half_a_surrogate_pair_and_endless_nesting_are_refused(tmp_path):
    path = tmp_path / "q.jsonl"
    path.write_text('{"turns": ["hi \\ud800"]}\n')
    with pytest.raises(UserError, match="line 1: a turn holds half a surrogate pair"):
        read_questions(path, None)
    path.write_text("[" * 60_000)
    with pytest.raises(UserError, match="line 1: not valid JSON"):
        read_questions(path, None)


def test_a_question_without_a_category_is_of_none(tmp_path):
    """Whichever way it is left out, as in rows."""
    path = tmp_path / "q.jsonl"
    path.write_text(
        '{"turns": ["a"]}\n{"turns": ["b"], "category": null}\n{"turns": ["c"], "category": "sea"}\n'
    )
    assert [question.category for question in read_questions(path)] == ["", "", "sea"]
