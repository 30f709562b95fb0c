"""``eagle tune``: times measured, the best draft chosen and decoded, a loss said plainly."""

from __future__ import annotations

import json
import re
from dataclasses import replace

import pytest
import torch

from eagle_cli.main import main
from eagle_cli.tune import _following
from eagle_train.decoding.shapes import Chain, Dynamic, Static, read_shape
from eagle_train.errors import UserError
from eagle_train.evaluation.machine import OUTPUTS, ROWS, SIZES, Machine, measure
from eagle_train.evaluation.replay import NEVER, Tables
from eagle_train.evaluation.tree_replay import TreeTables
from eagle_train.evaluation.tuning import candidates, lines, tune
from eagle_train.heads.config import HeadConfig
from eagle_train.heads.disk import build_head, save_head
from eagle_train.targets.load import load_target


@pytest.fixture(scope="module")
def head(target):
    torch.manual_seed(0)
    return build_head(HeadConfig.for_target(target.config.to_dict(), "eagle3"))


def machine(per_token: float, per_level: float = 0.0) -> Machine:
    """A machine whose forward takes 1 second and `per_token` for each further token."""
    verify = tuple(1 + per_token * (size - 1) for size in SIZES)
    return Machine(verify, (per_level,) * len(ROWS), 0.0, (0.0,) * len(OUTPUTS), 0.0)


def half_right(rows: int = 60) -> Tables:
    """A head whose best guess is right at two rows of three at the first step, and so on, never sure."""
    generator = torch.Generator().manual_seed(0)
    ranks = torch.randint(0, 3, (8, rows), generator=generator)
    sure = torch.full((8, rows), 0.5)
    return Tables(ranks, sure, sure, torch.ones(8, rows) / 3, list(range(rows, 0, -1)))


def best(found: Tables, on: Machine, greedy: bool = True):
    return max(candidates(found, on, greedy), key=lambda one: one.rate)


def test_free_tokens_call_for_a_large_tree_and_dear_ones_for_little():
    found = half_right()
    free = best(found, machine(0.0))
    assert isinstance(free.shape, Static)
    assert len(free.shape.paths) >= 39
    dear = best(found, machine(2.0, 1.0))
    assert dear.shape.figures["nodes"] <= 2
    assert dear.rate <= 1.001  # plain decoding makes one token a second
    levels = best(found, machine(0.0, per_level=0.5))
    assert levels.shape.figures["depth"] < free.shape.figures["depth"]


def test_a_dynamic_tree_is_worth_its_drafting_steps_where_they_are_cheap():
    """A head whose second guess is right wherever its first is not, one level deep or two."""
    ranks = torch.full((60, 2, 2), NEVER)
    ranks[:, 0, 0] = ranks[:, 1, 0] = torch.arange(60) % 2
    ranks[:, 1, 1] = 2
    steps = {(2, 1): 0.0, (3, 2): 1.0}
    grown = TreeTables(4, ranks, steps, list(range(60, 0, -1)))

    def offered(per_level: float) -> dict:
        found = candidates(half_right(), machine(0.0, per_level), True, [grown])
        return {one.shape: one for one in found if isinstance(one.shape, Dynamic)}

    one_level, two_levels = Dynamic(3, 4, 1), Dynamic(4, 4, 2)
    assert {shape: one.tau for shape, one in offered(0.0).items()} == {one_level: 2.0, two_levels: 3.0}
    cheap, dear = offered(0.1), offered(2.0)
    assert cheap[two_levels].rate > cheap[one_level].rate
    assert dear[two_levels].rate < dear[one_level].rate


def test_a_chain_stops_where_the_head_knows_that_it_is_wrong():
    found = half_right()
    right = (found.ranks == 0).cumprod(0).bool()
    knows = replace(found, sure=torch.where(right, 0.99, 0.01))
    slow = machine(0.3, 0.1)
    chains = [one for one in candidates(knows, slow, True) if isinstance(one.shape, Chain)]
    assert max(chains, key=lambda one: one.rate).shape.stop > 0
    blind = [one for one in candidates(found, slow, True) if one.shape == Chain(4)]
    assert max(one.rate for one in chains) > 1.2 * blind[0].rate


def test_times_between_sizes_are_interpolated():
    on = machine(0.25)
    for size in (1, 2, 5, 7, 40, 64, 80):
        assert on.verification(size) == pytest.approx(1 + 0.25 * (size - 1))
    assert on.plain_token() == 1
    dear = Machine(on.verify, on.draft, 0.0, tuple(float(size) for size in OUTPUTS), 0.5)
    assert dear.round(5, [], 2.0) == pytest.approx(2 + 5 + 0.5)  # all at once
    assert dear.round(21, [], 2.0) == pytest.approx(6 + 2 + 0.5)  # where the walk comes by


def test_the_machine_is_measured(target, head):
    found = measure(head, target, [(37 * i + 5) % 290 for i in range(30)])
    assert min(*found.verify, *found.draft, *found.output, found.observe) > 0
    assert list(found.verify) == sorted(found.verify)
    assert list(found.draft) == sorted(found.draft)
    assert found.overhead >= 0
    assert set(found.figures["verify_ms"]) == {str(size) for size in SIZES}


def test_tune_reports_predicted_and_measured_and_writes_a_draft_that_eval_takes(
    head, tiny_target_dir, tmp_path, capsys
):
    save_head(head, tmp_path / "head")
    words = ["tune", tmp_path / "head", "--target", tiny_target_dir, "--num-questions", 2]
    words += ["--max-new-tokens", 8, "--out", tmp_path / "tuned.json"]
    with pytest.raises(SystemExit) as left:
        main([str(word) for word in words])
    assert not left.value.code
    out = capsys.readouterr().out
    assert "times plain decoding" in out
    measured = float(re.search(r"measured ([\d.]+) \(", out)[1])  # noise decides: a random head, few tokens
    if measured != 1:
        assert ("speculation loses here" in out) == (measured < 1)
    assert f" --draft {tmp_path / 'tuned.json'}" in out.splitlines()[-1]
    few = (
        r"acceptance was learned from \d+ tokens? of 1 prompt: too few to choose by, wanted 256 of 4 at least"
    )
    assert re.search(few, out)
    read_shape(tmp_path / "tuned.json")
    words = ["eval", tmp_path / "head", "--target", tiny_target_dir, "--num-questions", 1, "--max-turns", 1]
    words += ["--max-new-tokens", 5, "--draft", tmp_path / "tuned.json", "--json"]
    with pytest.raises(SystemExit) as left:
        main([str(word) for word in words])
    assert not left.value.code
    assert json.loads(capsys.readouterr().out)["lossless"] is True


@pytest.mark.parametrize(
    ("tokens", "prompts", "speedup", "following"),
    [
        (255, 4, 2.0, "the same with more"),
        (256, 3, 2.0, "the same with more"),
        (256, 4, 0.8, "train longer"),
        (256, 4, 2.0, "the same with --out tuned.json"),
    ],
)
def test_only_what_wins_by_enough_is_advised(tokens, prompts, speedup, following):
    draft = {"draft": "chain of 3", "tau": 1.5, "milliseconds": 9.0, "speedup": 1.2}
    machine = {"verify_ms": {}, "draft_ms": {}, "output_ms": {}, "observe_ms": 1.0, "overhead_ms": 1.0}
    names = {"head": "h", "target": "t", "temperature": 0.0, "dtype": "fp32", "device": "cpu", "threads": 1}
    report = {
        **names,
        "machine": machine,
        "candidates": [draft],
        "best": draft,
        "predicted_speedup": 1.2,
        "measured_speedup": speedup,
        "predicted_tau": 1.5,
        "measured_tau": 1.5,
        "wins": speedup > 1,
        "learned_from": {"tokens": tokens, "prompts": prompts},
    }
    said = "\n".join(lines(report))
    assert "1 thread\n" in said
    assert ("too few to choose by" in said) == (tokens < 256 or prompts < 4)
    assert ("best: chain of 3;" in said) == (speedup > 1)
    assert ("best: plain decoding; of the drafts the closest: chain of 3;" in said) == (speedup < 1)
    assert _following(report).startswith(following)


def test_sampling_is_tuned_for_too(head, target):
    from eagle_train.decoding.sampling import Sampling

    report = tune(head, target, num_questions=2, max_new_tokens=8, sampling=Sampling(1.0), show=False)
    rates = [one["speedup"] for one in report["candidates"]]
    assert rates == sorted(rates, reverse=True)
    kinds = {one["draft"].split()[0] for one in report["candidates"]}
    assert kinds == {"chain", "static", "dynamic"}
    assert report["best"]["draft"] == report["candidates"][0]["draft"]
    assert report["wins"] == (report["measured_speedup"] > 1)
    assert report["measured"]["tree"] == report["best"]["shape"]
    json.dumps(report)


def test_the_callers_head_is_left_as_it_is(head, tiny_target_dir):
    target = load_target(str(tiny_target_dir), dtype="bf16", device="cpu")
    tune(head, target, num_questions=2, max_new_tokens=4, show=False)
    assert {parameter.dtype for parameter in head.parameters()} == {torch.float32}


def test_one_question_is_too_few_and_an_answer_must_be_readable(head, target):
    with pytest.raises(UserError, match=r"--out tuned: wanted a file ending in \.json"):
        tune(head, target, out="tuned", show=False)
    with pytest.raises(UserError, match="got one question, wanted at least two"):
        tune(head, target, num_questions=1, show=False)
