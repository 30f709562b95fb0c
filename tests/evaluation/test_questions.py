"""Question files, whose every fault is one line with its place, and public sets by name."""

import pytest

from eagle_train.errors import UserError
from eagle_train.evaluation.hub_questions import SETS
from eagle_train.evaluation.questions import read_questions

RECORDS = {
    "mt_bench": {"prompt": ["One?", "Two?"], "category": "writing"},
    "gsm8k": {"question": "1 + 1?", "answer": "2"},
    "humaneval": {"prompt": "def f():", "canonical_solution": "pass"},
    "alpaca": {"instruction": "Say it.", "input": "loud", "output": "IT"},
    "cnn_dm": {"article": "Long ago.", "highlights": "."},
}


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


@pytest.mark.usefixtures("no_hub")
@pytest.mark.parametrize("name", SETS)
def test_public_sets_are_read_by_name(monkeypatch, name):
    import datasets

    asked = []

    def load(repository, config, split):
        asked.append((repository, config, split))
        return [{**RECORDS[name], "n": i} for i in range(200)]

    monkeypatch.setattr(datasets, "load_dataset", load)
    questions = read_questions(name)
    assert len(questions) == 80
    assert asked == [(SETS[name].repository, SETS[name].config, SETS[name].split)]
    assert questions[0].category in ("writing", "math", "code", "instructions", "summarising")
    words = {
        "mt_bench": ("One?", "Two?"),
        "alpaca": ("Say it.\n\nloud",),
        "cnn_dm": ("Summarize: Long ago.",),
    }
    assert questions[0].turns == words.get(name, questions[0].turns)


@pytest.mark.usefixtures("no_hub")
def test_without_the_hub_a_public_set_is_one_line(monkeypatch):
    import datasets

    def load(*_, **__):
        raise ConnectionError("Couldn't reach 'openai/gsm8k' on the Hub")

    monkeypatch.setattr(datasets, "load_dataset", load)
    with pytest.raises(UserError, match=r"the hub gave no openai/gsm8k .* or give a file of JSON lines"):
        read_questions("gsm8k")
