"""An SGLang server's replies count for themselves; the loop is held against them prompt by prompt."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from eagle_train.decoding.drafters import HeadDrafter
from eagle_train.decoding.loop import Settings, generate
from eagle_train.decoding.shapes import Chain, Dynamic, Shape
from eagle_train.errors import UserError
from eagle_train.evaluation.questions import conversations
from eagle_train.evaluation.server import compare_with_server, server_lines
from eagle_train.heads.disk import load_head
from eagle_train.targets.load import Target

from .servers import QUESTIONS, sglang, sglang_info


def _answers(target: Target, head: Path, shape: Shape, limit: int) -> list[dict[str, Any]]:
    """Return what a server with this head and shape says to the questions."""
    drafter = HeadDrafter(load_head(head), target, shape)
    found = []
    for _, conversation in conversations(target.tokenizer, QUESTIONS):
        prompt = conversation.ask(0)
        made = generate(target, drafter, prompt, Settings(max_new_tokens=limit))
        found.append({"prompt": prompt, "limit": limit, "ids": made.ids, "rounds": made.accepted_uncut})
    return found


@pytest.mark.parametrize(
    ("shape", "info"),
    [(Chain(4), sglang_info(4, 1, 5)), (Dynamic(7, 3, 2), sglang_info(2, 3, 7))],
    ids=["chain", "tree"],
)
def test_an_sglang_server_is_known_by_itself_and_compared_by_its_own_count(
    shape, info, target, head, tmp_path
):
    answers = _answers(target, head, shape, 30)
    rounds = [accepted for answer in answers for accepted in answer["rounds"]]
    tokens = sum(len(answer["ids"]) for answer in answers)
    with sglang(tmp_path, info, answers) as url:
        report = compare_with_server(head, target, url, QUESTIONS, max_new_tokens=30, show=False)
    assert report["differences"] == []
    assert (report["server"]["engine"], report["tree"]) == ("SGLang", shape.figures)
    assert report["counts_as"] == "completion tokens / verifications"
    assert sum(rounds) > 0  # or nothing was compared
    for side in ("server", "loop"):
        assert report[side]["drafts"] == len(rounds)
        assert report[side]["acceptance_length"] == tokens / len(rounds)
        shares = [sum(n > i for n in rounds) / len(rounds) for i in range(shape.figures["depth"])]
        assert report[side]["accepted_by_position"] == shares
    assert f"SGLang at {url}: acceptance length " in "\n".join(server_lines(report))


def test_an_sglang_server_with_another_head_is_told_by_its_counters(target, head, tmp_path):
    answers = _answers(target, head, Chain(4), 30)
    answers[1]["rounds"][0] = 4 - answers[1]["rounds"][0]
    with sglang(tmp_path, sglang_info(4, 1, 5), answers) as url:
        report = compare_with_server(head, target, url, QUESTIONS, max_new_tokens=30, show=False)
    assert [(one["question"], one["same_text"]) for one in report["differences"]] == [("1", True)]


def test_an_answer_of_one_token_was_never_verified_by_sglang(target, head, tmp_path):
    answers = _answers(target, head, Chain(4), 1)
    with (
        sglang(tmp_path, sglang_info(4, 1, 5), answers) as url,
        pytest.raises(UserError, match="not one draft was counted in 3 prompts"),
    ):
        compare_with_server(head, target, url, QUESTIONS, max_new_tokens=1, show=False)
