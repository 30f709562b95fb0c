"""Who honours the processors that a target's generation_config sets, and who says that they do not."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from eagle_cli.main import main
from eagle_train.data.prepare import prepare
from eagle_train.decoding.law import own_law
from eagle_train.decoding.loop import Settings, plain
from eagle_train.decoding.sampling import Sampling, distribution, processed
from eagle_train.decoding.shapes import Chain, Static
from eagle_train.evaluation import tuning
from eagle_train.evaluation.evaluate import evaluate
from eagle_train.evaluation.predict import predict
from eagle_train.evaluation.questions import Question
from eagle_train.evaluation.replay import tables
from eagle_train.evaluation.report import predicted_lines
from eagle_train.heads.disk import load_head, save_head
from eagle_train.losses.acceptance import draft_logits, draft_steps
from eagle_train.regenerate.answers import AnswerSettings
from eagle_train.regenerate.regenerate import regenerate
from eagle_train.shards.batches import pack
from eagle_train.shards.reader import open_shards
from eagle_train.targets.extract import extract
from eagle_train.targets.load import load_target

from .conftest import fitted_head

OWN = {  # of the text, of where the answer began, and of the law
    "repetition_penalty": 1.4,
    "no_repeat_ngram_size": 3,
    "exponential_decay_length_penalty": [8, 1.3],
    "min_p": 0.02,
}
NAMES = f"the target's own {', '.join(OWN)}"
QUESTIONS = [Question(str(i), "", (f"Question {i}: " + "why is it so? " * i,)) for i in range(4)]
TOKENS = 24


@pytest.fixture(scope="module")
def own_dir(make_tiny_target, tmp_path_factory) -> Path:
    folder = make_tiny_target(tmp_path_factory.mktemp("target") / "own")
    file = folder / "generation_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **OWN}))
    return folder


@pytest.fixture(scope="module")
def own_target(own_dir):
    return load_target(str(own_dir), dtype="fp32", device="cpu")


@pytest.fixture(scope="module")
def own_head(own_target, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("heads") / "own"
    settings = Settings(TOKENS, own_law(own_target, Sampling()))
    save_head(fitted_head(own_target, QUESTIONS, settings), folder)
    return folder


def answer(target, out: Path, **how) -> Path:
    """The target's answers to the questions, four at once."""
    asked = out.with_name("asked.jsonl")
    asked.write_text("".join(json.dumps({"id": q.id, "turns": list(q.turns)}) + "\n" for q in QUESTIONS))
    settings = AnswerSettings(max_new_tokens=TOKENS, **how)
    regenerate([str(asked)], target, out, settings=settings, num_slots=4, show=False)
    return out


def lines_of(file: Path) -> list[dict]:
    return [json.loads(line) for line in file.read_text().split("\n") if line]


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_regenerated_answers_are_those_of_the_loop(own_target, tmp_path, temperature):
    answers = {}
    for name, kept in (("with", True), ("without", False)):
        folder = tmp_path / name
        folder.mkdir()
        how = {"temperature": temperature, "processors": kept}
        lines = lines_of(answer(own_target, folder / "a.jsonl", **how))
        assert [line["generated_by"].get("processors") for line in lines] == [OWN if kept else None] * 4
        answers[name] = [line["messages"][-1]["answer_ids"] for line in lines]
        sampling = Sampling(temperature)
        sampling = own_law(own_target, sampling) if kept else sampling
        for line, ids in zip(lines, answers[name], strict=True):
            shown = line["messages"][:-1]
            prompt = own_target.tokenizer.apply_chat_template(shown, add_generation_prompt=True)["input_ids"]
            seed = AnswerSettings().seed_of(line["row_id"], 0)
            assert ids == plain(own_target, prompt, Settings(TOKENS, sampling, seed=seed)).ids
    assert answers["with"] != answers["without"]


@pytest.fixture(scope="module")
def shards(own_target, own_dir, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("answered")
    file = answer(own_target, folder / "a.jsonl")
    prepare([str(file)], str(own_dir), folder / "rows", show=False)
    how = {"codec": "fp32", "dtype": "fp32", "device": "cpu", "show": False}
    extract(folder / "rows", str(own_dir), folder / "shards", features="eagle1", **how)
    return folder / "shards"


@pytest.mark.parametrize("draft", [Chain(3), Static(((0,), (1,), (0, 0), (0, 1)))], ids=["chain", "static"])
def test_greedy_prediction_is_exact_where_the_answers_were_written_with_them(
    own_target, own_head, shards, draft
):
    predicted = predict(own_head, shards, draft=draft, show=False)
    measured = evaluate(own_head, own_target, QUESTIONS, [draft], max_new_tokens=TOKENS, show=False)
    for name in ("tau", "rounds", "tokens", "accepted_histogram", "processors"):
        assert predicted[name] == measured[name], name
    assert predicted["tau"] > 1.2
    told = f"  provided that the answers were written with {NAMES}, as eval and regenerate do"
    assert told in predicted_lines(predicted)
    bare = predict(own_head, shards, draft=draft, processors=False, show=False)
    assert bare["processors"] == {}
    assert "provided" not in "\n".join(predicted_lines(bare))
    unlike = {"max_new_tokens": TOKENS, "processors": False, "show": False}
    assert evaluate(own_head, own_target, QUESTIONS, [draft], **unlike)["tau"] != predicted["tau"]


@torch.inference_mode()
def test_a_sampled_guess_stands_by_the_law_after_them(own_target, own_head, shards):
    """The naive twin reads every text anew and asks for the law that the loop would ask for there."""
    opened, sampling, numbers = open_shards(shards), own_law(own_target, Sampling(0.8)), [2, 0, 3]
    batch, head, frozen = (
        pack(opened.read_rows(numbers), "eagle1"),
        load_head(own_head),
        opened.frozen_target(),
    )
    found = tables(head, frozen, batch, 2, sampling)
    starts, compared = batch.row_starts.tolist(), 0
    for step in draft_steps(head, frozen, batch, 2):
        laws = distribution(draft_logits(head, step.out, frozen, step.number).float(), sampling)
        for entry, q in zip(step.index.tolist(), laws, strict=True):
            row = int(batch.rows[entry])
            document = max(i for i, start in enumerate(starts) if start <= row)
            known = row - starts[document] + 2 + step.number  # tokens before the one that is guessed
            text = batch.input_ids[starts[document] : starts[document + 1]].tolist()
            last = own_target.run_body(torch.tensor([text[:known]]))[0, -1]
            (span,) = opened.spans[numbers[document]]
            logits = processed(own_target.logits(last), text[:known], sampling, span[0])
            p = distribution(logits, sampling)[text[known]]
            expected = float((q[text[known]] / p).clamp(max=1))
            assert float(found.shares[step.number, entry]) == pytest.approx(expected, abs=1e-4)
            compared += 0 < expected < 1
    assert compared > 5
    warm = predict(own_head, shards, sampling=Sampling(0.8), show=False)
    bare = predict(own_head, shards, sampling=Sampling(0.8), processors=False, show=False)
    assert warm["processors"] == OWN
    assert warm["tau"] != pytest.approx(bare["tau"], abs=0.01)


def test_tune_learns_and_measures_with_them(own_target, own_head, monkeypatch):
    learned, measured = [], []
    real_plain, real_evaluate = tuning.plain, tuning.evaluate
    monkeypatch.setattr(
        tuning, "plain", lambda *given: learned.append(given[2].sampling) or real_plain(*given)
    )
    monkeypatch.setattr(
        tuning, "evaluate", lambda *given, **more: measured.append(more) or real_evaluate(*given, **more)
    )
    for kept, names in ((True, NAMES), (False, None)):
        settings = {"num_questions": 2, "max_new_tokens": 6, "processors": kept, "show": False}
        report = tuning.tune(own_head, own_target, **settings)
        assert report["processors"] == report["measured"]["processors"] == (OWN if kept else {})
        assert learned[-1] == measured[-1]["sampling"]
        assert (learned[-1].processors.values if kept else learned[-1].processors) == (OWN if kept else None)
        assert (f"temperature 0, {names}, fp32" in tuning.lines(report)[0]) == kept


@pytest.mark.parametrize("command", ["verify", "eval", "tune"])
def test_every_command_that_decodes_names_them_and_can_leave_them_out(own_dir, own_head, capsys, command):
    words = [command, str(own_head), "--target", str(own_dir), "--num-questions", "2"]
    words += ["--max-new-tokens", "4", "--dtype", "fp32"]
    if command != "tune":
        words += ["--draft", "chain", "--max-turns", "1"]
    for more in ((), ("--no-processors",)):
        with pytest.raises(SystemExit) as left:
            main([*words, *more])
        assert not left.value.code
        assert (NAMES in capsys.readouterr().out) == (not more)


def test_what_no_tree_can_honour_is_refused_by_every_command(make_tiny_target, own_head, tmp_path, capsys):
    folder = make_tiny_target(tmp_path / "refused")
    file = folder / "generation_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "renormalize_logits": True}))
    (tmp_path / "asked.jsonl").write_text(json.dumps({"turns": ["Why?"]}) + "\n")
    regenerated = [
        "regenerate",
        tmp_path / "asked.jsonl",
        "--out",
        tmp_path / "a.jsonl",
        "--max-new-tokens",
        "3",
    ]
    for words in (["tune", own_head], ["verify", own_head, "--dtype", "fp32"], regenerated):
        with pytest.raises(SystemExit) as left:
            main([str(word) for word in (*words, "--target", folder)])
        assert left.value.code == 2
        assert "its generation_config sets renormalize_logits to True" in capsys.readouterr().err
    with pytest.raises(SystemExit) as left:
        main([str(word) for word in (*regenerated, "--target", folder, "--no-processors")])
    assert not left.value.code
