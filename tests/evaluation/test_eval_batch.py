"""``eagle eval --batch N``: the same answers and rounds as one by one, every method and every turn."""

from __future__ import annotations

import json

import pytest

from eagle_cli.main import main
from eagle_train.decoding.batch import Job, generate_together
from eagle_train.decoding.loop import Generation
from eagle_train.decoding.sampling import Sampling
from eagle_train.decoding.shapes import Chain, Dynamic
from eagle_train.errors import UserError
from eagle_train.evaluation import comparison
from eagle_train.evaluation.evaluate import evaluate
from eagle_train.evaluation.methods import Method
from eagle_train.evaluation.questions import Question
from eagle_train.evaluation.report import lines
from eagle_train.targets.load import Target

QUESTIONS = [
    Question("a", "sea", ("Why is the sea deep?", "And the moon?")),
    Question("b", "bread", ("How do I bake bread?",)),
    Question("c", "sea", ("Boat?", "Where?")),
]
COUNTED = ("rounds", "tokens", "accepted_histogram", "tau_by_place", "tau_by_context", "tau_by_category")


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(0.9)], ids=["greedy", "sampled"])
def test_a_batch_gives_the_figures_of_one_by_one(target, head_dir, sampling):
    """Sampled answers are drawn by each prompt's own seed, so they are the same too."""
    given = {"methods": [Method("prompt-lookup")], "sampling": sampling, "max_new_tokens": 8, "show": False}
    reports = [
        evaluate(head_dir, target, QUESTIONS, [Chain(2), Dynamic(6, 3, 2)], batch=batch, **given)
        for batch in (1, 2)
    ]
    alone, together = reports
    assert together["batch"] == 2
    assert alone["plain"]["tokens"] == together["plain"]["tokens"]
    assert alone["prompts"] == together["prompts"] == 5
    for one, other in zip(alone["results"], together["results"], strict=True):
        assert {name: one[name] for name in COUNTED} == {name: other[name] for name in COUNTED}
        assert one["lossless"] == other["lossless"] == (True if sampling.greedy else None)
        assert other["tokens_per_second"] > 0
    assert "plain decoding, 2 prompts at once: " in lines(together)[1]
    assert "at once" not in "\n".join(lines(alone))
    assert together["results"][2]["a_round"] == alone["results"][2]["a_round"]


def test_a_difference_in_a_batch_is_found(target, head_dir, monkeypatch):
    def wrong(model: Target, jobs: list[Job], *given) -> list[Generation]:
        made = generate_together(model, jobs, *given)
        if jobs[0].drafter is not None:
            made[-1].ids[3] = (made[-1].ids[3] + 1) % 300
        return made

    monkeypatch.setattr(comparison, "generate_together", wrong)
    report = evaluate(head_dir, target, QUESTIONS, [Chain(2)], max_new_tokens=5, batch=8, show=False)
    places = [(one["question"], one["turn"], one["at"]) for one in report["differences"]]
    assert places == [("question c", 1, 3), ("question c", 2, 3)]
    assert report["batch"] == len(QUESTIONS)  # as many as there were
    assert lines(report)[1].startswith("plain decoding, 3 prompts at once: ")


def test_batch_is_an_option_of_eval_and_sizes_out_of_range_are_refused(
    head_dir, target, tiny_target_dir, capsys
):
    words = ["eval", head_dir, "--target", tiny_target_dir, "--num-questions", 2, "--max-turns", 1]
    words += ["--max-new-tokens", 4, "--draft", "chain", "--batch", 2, "--json"]
    with pytest.raises(SystemExit) as left:
        main([str(word) for word in words])
    assert not left.value.code
    report = json.loads(capsys.readouterr().out)
    assert (report["batch"], report["lossless"]) == (2, True)
    for size in (0, 257):
        with pytest.raises(UserError, match=f"batch: got {size} prompts at once, wanted at"):
            evaluate(head_dir, target, QUESTIONS, batch=size, show=False)
