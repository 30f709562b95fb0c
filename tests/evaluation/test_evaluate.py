"""Evaluation: pooled figures, losslessness checked on every prompt, questions in MT-bench form."""

from __future__ import annotations

import json
from contextlib import contextmanager

import pytest

from eagle_train.decoding import loop
from eagle_train.decoding.drafters import HeadDrafter
from eagle_train.decoding.loop import Generation
from eagle_train.decoding.sampling import Sampling
from eagle_train.decoding.shapes import Chain, Dynamic, Static
from eagle_train.errors import UserError
from eagle_train.evaluation import comparison
from eagle_train.evaluation.evaluate import evaluate
from eagle_train.evaluation.figures import Classes, Tally, method_figures
from eagle_train.evaluation.heads import find_head
from eagle_train.evaluation.questions import Question, read_questions
from eagle_train.evaluation.report import lines
from eagle_train.heads.config import HeadConfig
from eagle_train.heads.disk import build_head
from eagle_train.progress import Progress

QUESTIONS = [
    Question("a", "sea", ("Why is the sea deep?", "And the moon?")),
    Question("b", "bread", ("How do I bake bread?",)),
]


def test_several_drafts_share_one_plain_run_and_stay_lossless(target, head_dir, monkeypatch):
    runs = []
    monkeypatch.setattr(
        comparison, "plain", lambda *given, **more: runs.append(1) or loop.plain(*given, **more)
    )
    report = evaluate(
        head_dir, target, QUESTIONS, [Chain(3), Static(), Dynamic(12, 3, 4)], max_new_tokens=16, show=False
    )
    assert len(runs) == 1 + 3  # one to warm up, one for each turn
    assert [result["lossless"] for result in report["results"]] == [True] * 3
    assert report["prompts"] == 3
    assert "tau" not in report
    for result in report["results"]:
        assert result["tokens"] == report["plain"]["tokens"] - 3
        assert result["tau"] == result["tokens"] / result["rounds"]
        assert sum(result["accepted_histogram"]) == result["rounds"]
        assert len(result["accepted_by_position"]) == result["tree"]["depth"]
        assert result["speedup"] == pytest.approx(
            result["tokens_per_second"] / report["plain"]["tokens_per_second"]
        )
        assert result["round_cost"] * result["speedup"] == pytest.approx(result["tau"])
        assert set(result["tau_by_category"]) == {"sea", "bread"}
    json.dumps(report)


def test_one_draft_has_its_figures_at_the_top_under_the_agreed_names(target, head_dir):
    report = evaluate(head_dir, target, QUESTIONS[1:], [Chain(2)], max_new_tokens=8, show=False)
    names = """tau rounds tokens accepted_by_position accepted_given_previous accepted_histogram
    tokens_per_second plain_tokens_per_second speedup speedup_with_prefill lossless tree temperature dtype"""
    assert set(names.split()) <= set(report)
    assert report["dtype"] == "fp32"
    assert report["tree"] == {"draft": "chain", "nodes": 3, "depth": 2}
    assert "equal to plain decoding on every prompt" in "\n".join(lines(report))


@pytest.mark.parametrize("batch", [1, 2])
def test_progress_counts_tokens_and_expects_none_of_answers_that_ended(batch, target, head_dir, monkeypatch):
    shown = []

    @contextmanager
    def progress(title, total, unit, show):
        shown.append((total, unit, Progress(title, total, unit)))
        yield shown[-1][2]

    monkeypatch.setattr("eagle_train.evaluation.evaluate.progress", progress)
    monkeypatch.setitem(vars(target), "eos_ids", tuple(range(150)))
    short = [Question("a", "sea", ("Why?",)), Question("b", "bread", ("How?",))]
    report = evaluate(head_dir, target, short, [Chain(2)], max_new_tokens=16, batch=batch, show=False)
    ((total, unit, bar),) = shown
    emitted = report["plain"]["tokens"] + report["results"][0]["tokens"] + report["prompts"]
    assert (total, unit) == (2 * 2 * 16, "tokens")
    assert bar.done == bar.total == emitted < total


def test_the_usual_draft_is_static_for_eagle1_and_dynamic_for_eagle3(target, head_dir):
    eagle1 = build_head(HeadConfig.for_target(target.config.to_dict(), "eagle1"))
    for head, draft in ((eagle1, "static"), (head_dir, "dynamic")):
        report = evaluate(head, target, QUESTIONS[1:], max_new_tokens=4, show=False)
        assert report["tree"]["draft"] == draft


def test_a_later_turn_is_asked_on_the_answered_history(target, head_dir, monkeypatch):
    prompts = []

    def spy(model, prompt, *given, **more):
        prompts.append(list(prompt))
        return loop.plain(model, prompt, *given, **more)

    monkeypatch.setattr(comparison, "plain", spy)
    evaluate(head_dir, target, QUESTIONS[:1], [Chain(1)], max_new_tokens=6, show=False)
    _, first, second = (target.tokenizer.decode(prompt) for prompt in prompts)
    answer = loop.plain(target, prompts[1], loop.Settings(max_new_tokens=6)).ids
    said = target.tokenizer.decode(answer, skip_special_tokens=True)
    assert first.endswith("<|im_start|>user\nWhy is the sea deep?<|im_end|>\n<|im_start|>assistant\n")
    assert (
        second
        == first + said + "<|im_end|>\n<|im_start|>user\nAnd the moon?<|im_end|>\n<|im_start|>assistant\n"
    )
    prompts.clear()
    evaluate(head_dir, target, QUESTIONS, [Chain(1)], max_new_tokens=2, max_turns=1, show=False)
    assert len(prompts) == 1 + 2


def test_a_difference_is_found_and_its_gap_told(target, head_dir, monkeypatch):
    def wrong(*given, **more) -> Generation:
        made = loop.generate(*given, **more)
        made.ids[5] = (made.ids[5] + 1) % 300
        return made

    monkeypatch.setattr(comparison, "generate", wrong)
    report = evaluate(head_dir, target, QUESTIONS, [Chain(2)], max_new_tokens=8, show=False)
    assert report["lossless"] is False
    first = report["differences"][0]
    assert (first["question"], first["turn"], first["at"]) == ("question a", 1, 5)
    assert first["token"] == (first["plain_token"] + 1) % 300
    assert first["gap"] > 0
    assert "differs from plain decoding on 3 prompts; first: question a, turn 1, token 5" in "\n".join(
        lines(report)
    )


def test_sampling_makes_no_claim_about_ids(target, head_dir):
    report = evaluate(
        head_dir,
        target,
        QUESTIONS[1:],
        [Chain(2)],
        sampling=Sampling(0.8, 20, 0.9),
        max_new_tokens=6,
        show=False,
    )
    assert report["lossless"] is None
    assert (report["temperature"], report["top_k"], report["top_p"]) == (0.8, 20, 0.9)
    assert "law is kept" in "\n".join(lines(report))


def test_half_precision_runs_and_the_head_follows_the_target(tiny_target_dir, head_dir):
    report = evaluate(
        head_dir, str(tiny_target_dir), QUESTIONS[1:], [Chain(2)], dtype="bf16", max_new_tokens=6, show=False
    )
    assert report["dtype"] == "bf16"
    assert report["lossless"] == (not report["differences"])
    assert report["tokens"] == report["plain"]["tokens"] - report["prompts"]
    assert report["rounds"] == sum(report["accepted_histogram"])
    for difference in report["differences"]:  # in half precision near-ties may flip, and nothing else
        assert difference["gap"] < 0.1


def test_figures_pool_rounds_and_leave_the_prefill_out():
    tally, plain = Tally(), Tally()
    tally.add(Generation([1, 2, 3, 4], [1, 0], [3, 0], True, 0.5, 1.0), "x")  # 3 tokens in 2 rounds
    tally.add(Generation([1, 2, 3], [1], [1], True, 0.5, 0.5), "y")  # 2 tokens in 1 round
    tally.add(Generation([1], [], [], True, 0.5, 0.0), "y")  # ended at once: no round
    plain.add(Generation(list(range(6)), prefill_seconds=1.0, decode_seconds=2.5), "x")
    figures = method_figures(tally, plain, Chain(3).figures)
    assert figures["tau"] == 5 / 3
    assert figures["accepted_by_position"] == [2 / 3, 0, 0]
    assert figures["accepted_given_previous"] == [2 / 3, 0, 0]
    assert figures["accepted_histogram"] == [1, 2, 0, 0]
    assert figures["vllm_acceptance_length"] == 1 + 4 / 3
    assert figures["sglang_acceptance_length"] == 8 / 3
    assert figures["tokens_per_second"] == pytest.approx(5 / 1.5)
    assert figures["plain_tokens_per_second"] == 2.0
    assert figures["speedup"] == pytest.approx(5 / 1.5 / 2)
    assert figures["speedup_with_prefill"] == pytest.approx((8 / 3) / (6 / 3.5))
    assert figures["tau_by_category"] == {"x": 1.5, "y": 2.0}


def test_rounds_without_a_category_are_of_none_where_others_have_one():
    classes = Classes[str]()
    classes.add("", 2.0)
    assert classes.taus == {}
    classes.add("sea", 3.0)
    classes.add("none", 4.0)
    assert list(classes.taus.items()) == [("none", 3.0), ("sea", 3.0)]


def test_built_in_questions_are_there_and_can_be_thinned():
    questions = read_questions()
    assert len(questions) == 60
    assert len({question.id for question in questions}) == 60
    few = read_questions(limit=20)
    assert few == [questions[3 * i] for i in range(20)]
    assert read_questions(limit=1000) == questions


def test_question_files_are_read_and_refused_by_line(tmp_path):
    file = tmp_path / "questions.jsonl"
    file.write_text(
        '\ufeff{"question_id": 7, "category": "c", "turns": ["one", "two"]}\n\n{"turns": ["x"]}\n'
    )
    first, second = read_questions(file)
    assert first == Question("7", "c", ("one", "two"))
    assert second.turns == ("x",)
    for text, words in (
        ("", "holds no questions"),
        ('{"turns": ["a"]}\n{"turns": ["a"', "line 2: not valid JSON"),
        ('{"prompt": "a"}', "line 1: no turns; wanted MT-bench form"),
        ('{"turns": []}', "line 1: no turns"),
        ('{"turns": [" "]}', "line 1: an empty turn"),
        ("[1]", "line 1: no turns"),
    ):
        file.write_text(text)
        with pytest.raises(UserError, match=words):
            read_questions(file)
    with pytest.raises(UserError, match="No such file"):
        read_questions(tmp_path / "none.jsonl")
    with pytest.raises(UserError, match="num-questions: got 0"):
        read_questions(limit=0)


def test_a_head_is_a_directory_or_a_runs_best(head_dir, tmp_path):
    assert find_head(head_dir) == head_dir
    run = tmp_path / "run"
    run.mkdir()
    (run / "best").symlink_to(head_dir)
    assert find_head(run).resolve() == head_dir.resolve()
    with pytest.raises(UserError, match="no such folder; wanted a run, a head directory or a hub id"):
        find_head(tmp_path / "nothing" / "here")
    with pytest.raises(UserError, match="holds neither"):
        find_head(tmp_path)


def test_a_hub_id_without_a_head_is_refused_in_one_line(monkeypatch):
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(UserError, match="nobody/nothing: no such folder, and the hub gave no head"):
        find_head("nobody/nothing")


def test_a_head_drafter_keeps_to_the_target_it_fits(target, head_dir):
    with pytest.raises(UserError, match="wanted at least 1"):
        Chain(0)
    with pytest.raises(UserError, match="got total_tokens 1, wanted at least 2"):
        Dynamic(total_tokens=1)
    assert (
        HeadDrafter(
            build_head(HeadConfig.for_target(target.config.to_dict(), "eagle1")), target, Chain()
        ).layer_ids
        == ()
    )
