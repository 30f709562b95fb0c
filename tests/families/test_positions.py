"""Where a target's positions end, texts end: guesses beyond change nothing, longer texts are refused."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from eagle_train.decoding.draft_model import DraftModel, first_layers
from eagle_train.decoding.lookahead import Lookahead
from eagle_train.decoding.loop import Settings, generate, plain
from eagle_train.decoding.prompt_lookup import PromptLookup
from eagle_train.decoding.sampling import Sampling
from eagle_train.errors import UserError
from eagle_train.regenerate.answers import AnswerSettings
from eagle_train.regenerate.regenerate import regenerate
from eagle_train.targets.load import Target, load_target

from .conftest import PROMPT
from .models import family_config, longrope, random_model, save_target
from .scripted import Scripted


@pytest.mark.parametrize("length", [30, 31])
def test_texts_end_where_longrope_changes_its_angles(length):
    """Up to there trees are read as the text alone; a token more is refused before anything is read."""
    target = Target("phi", None, random_model(longrope(30)))
    settings = Settings(max_new_tokens=length - len(PROMPT), eos_ids=())
    if length == 31:
        with pytest.raises(UserError, match="prompt and answer: 31 tokens, wanted at most 30"):
            plain(target, PROMPT, settings)
        return
    wanted = plain(target, PROMPT, settings).ids
    own = target.model(torch.tensor([[*PROMPT, *wanted]]), use_cache=False).logits[0]
    assert wanted == own[len(PROMPT) - 1 : -1].argmax(-1).tolist()
    with pytest.raises(UserError, match="phi: 31 tokens, wanted at most 30"):
        target.run_body(torch.zeros(1, 31, dtype=torch.int64))
    generate(target, Scripted([*PROMPT, *wanted], ()), PROMPT, Settings(max_new_tokens=7, eos_ids=()))


def bounded(family: str, positions: int, seed: int = 0) -> Target:
    """A target whose positions end: a learned table, or RoPE whose angles change."""
    if family == "gpt2":
        config = family_config("gpt2", max_position_embeddings=positions)
    else:
        config = longrope(positions)
    return Target(family, None, random_model(config, seed))


@pytest.mark.parametrize("family", ["gpt2", "phi3-long"])
@pytest.mark.parametrize("sampling", [Sampling(), Sampling(0.7)], ids=["greedy", "sampled"])
def test_guesses_beyond_the_last_position_change_nothing(family, sampling):
    target = bounded(family, 40)
    settings = Settings(max_new_tokens=40 - len(PROMPT), eos_ids=(), sampling=sampling)
    wanted = plain(target, PROMPT, settings).ids
    short = bounded(family, 30, seed=1)  # ends earlier than the target
    drafters = {
        "lookahead": Lookahead(target, 7, 4, 7),
        "prompt-lookup": PromptLookup(8),
        "first layers": DraftModel(first_layers(target, 6), target, 6, sampling),
        "itself": DraftModel(target, target, 6, sampling),
        "shorter": DraftModel(short, target, 6, sampling),
        "scripted": Scripted([*PROMPT, *wanted, *range(20)], ()),
    }
    for name, drafter in drafters.items():
        for block in (False, True):
            made = generate(target, drafter, PROMPT, replace(settings, block=block))
            assert len(made.ids) == len(wanted), name
            assert made.ids == wanted or not sampling.greedy, name
    long = DraftModel(short, target, 6, sampling)  # a prompt beyond its positions: it never drafts
    made = generate(target, long, [*PROMPT, *wanted[:12]], Settings(max_new_tokens=8, eos_ids=()))
    assert made.accepted == [0] * 7
    with pytest.raises(UserError, match="prompt and answer: 41 tokens, wanted at most 40"):
        plain(target, PROMPT, replace(settings, max_new_tokens=41 - len(PROMPT)))


def test_answers_beyond_learned_positions_are_refused_before_any_decoding(tmp_path, tiny_target_dir):
    from eagle_train.evaluation.evaluate import evaluate
    from eagle_train.evaluation.methods import Method
    from eagle_train.evaluation.questions import Question

    save_target(tmp_path / "gpt2", family_config("gpt2", max_position_embeddings=120), tiny_target_dir)
    asked = [Question("short", "", ("Hi",)), Question("long", "", ("why is it so? " * 4,))]
    given = {"methods": [Method("lookahead"), Method("draft-model", "first:6")], "show": False}
    report = evaluate(None, tmp_path / "gpt2", asked[:1], max_new_tokens=20, dtype="fp32", **given)
    assert all(result["lossless"] for result in report["results"])
    with pytest.raises(
        UserError, match=r"^question long with --max-new-tokens 80: \d+ tokens, wanted at most 120"
    ):
        evaluate(None, tmp_path / "gpt2", asked, max_new_tokens=80, dtype="fp32", **given)


@pytest.mark.parametrize("batch", [1, 3])
def test_later_turns_end_where_the_targets_positions_do(tmp_path, tiny_target_dir, batch):
    """With their history: the answer is given fewer tokens, or the turn is left out, and both are said."""
    from eagle_train.evaluation.evaluate import evaluate
    from eagle_train.evaluation.methods import Method
    from eagle_train.evaluation.questions import Question

    save_target(tmp_path / "gpt2", family_config("gpt2", max_position_embeddings=140), tiny_target_dir)
    asked = [Question("chat", "", ("Hi",) * 4)]
    given = {"methods": [Method("prompt-lookup"), Method("draft-model", "first:6")], "show": False}
    given["batch"] = batch
    with pytest.warns(
        UserWarning, match="of 4 turns 1 left out and 1 given fewer new tokens: .* last position, 140"
    ):
        report = evaluate(None, tmp_path / "gpt2", asked, max_new_tokens=20, dtype="fp32", **given)
    assert (report["prompts"], report["turns_left_out"], report["turns_cut_short"]) == (3, 1, 1)
    assert all(result["lossless"] for result in report["results"])
    assert 2 * 20 < report["plain"]["tokens"] < 3 * 20


def test_regenerated_answers_end_where_the_angles_change(tmp_path: Path, tiny_target_dir: Path) -> None:
    """Of three prompts one is past the switch, one leaves room for a short answer, one for a whole one."""
    folder = save_target(tmp_path / "target", longrope(64), tiny_target_dir)
    target = load_target(folder, dtype="fp32", device="cpu")
    questions = ["Hi", "the sea " * 5, "the sea " * 40]
    lines = [json.dumps({"messages": [{"role": "user", "content": text}]}) for text in questions]
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    settings = AnswerSettings(max_new_tokens=24)
    report = regenerate(
        [str(tmp_path / "a.jsonl")],
        target,
        tmp_path / "out.jsonl",
        settings=settings,
        num_slots=2,
        show=False,
    )
    assert "room for 64" in report["failures"][0]["reason"]
    assert (report["failed"], report["answers"], report["unfinished"]) == (1, 2, 2)
    said = [json.loads(line)["messages"][-1] for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    prompts = [
        target.tokenizer.apply_chat_template(
            [{"role": "user", "content": text}], add_generation_prompt=True, return_dict=False
        )
        for text in questions
    ]
    assert [len(answer["answer_ids"]) for answer in said] == [24, 64 - len(prompts[1])]
    assert len(prompts[1]) > 40
