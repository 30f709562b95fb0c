"""Prediction from shards and from files of answers, against the loop."""

from __future__ import annotations

import csv
import html
import io
import json
import re
from pathlib import Path

import pytest
import torch

from eagle_train.data.prepare import prepare
from eagle_train.decoding.loop import Settings, generate
from eagle_train.decoding.medusa import MedusaDrafter
from eagle_train.decoding.sampling import Sampling
from eagle_train.decoding.shapes import Chain, Dynamic, Sampled, Static
from eagle_train.errors import UserError
from eagle_train.evaluation.evaluate import evaluate
from eagle_train.evaluation.predict import predict
from eagle_train.evaluation.questions import conversations
from eagle_train.evaluation.report import predicted_lines
from eagle_train.heads.config import HeadConfig
from eagle_train.heads.disk import build_head, load_head, save_head
from eagle_train.losses.acceptance import AcceptanceCounts
from eagle_train.recipe_files import load_recipe
from eagle_train.shards.reader import open_shards
from eagle_train.targets.extract import extract
from eagle_train.targets.load import Target
from eagle_train.training.held_out import split
from eagle_train.training.loop import train

from .answers import QUESTIONS, record_of, some_head, write_answers, write_records


@pytest.fixture(scope="module")
def answered(target: Target, tiny_target_dir: Path, tmp_path_factory) -> tuple[Path, dict[str, Path]]:
    """The target's answers as a file, and shards of them for either kind of head."""
    folder = tmp_path_factory.mktemp("answered")
    write_answers(target, folder / "answers.jsonl")
    prepare([str(folder / "answers.jsonl")], str(tiny_target_dir), folder / "rows", show=False)
    shards = {kind: folder / kind for kind in ("eagle1", "eagle3")}
    for kind, out in shards.items():
        settings = {"codec": "fp32", "dtype": "fp32", "device": "cpu", "show": False}
        extract(folder / "rows", str(tiny_target_dir), out, features=kind, **settings)
    return folder / "answers.jsonl", shards


@pytest.fixture(scope="module")
def trained(answered, tmp_path_factory) -> dict[str, Path]:
    """Runs whose heads know the texts by heart, but for one conversation that was held out."""
    runs = {}
    for kind, shards in answered[1].items():
        own = ["head.kind=eagle1", "head.draft_vocab_size=null"] if kind == "eagle1" else []
        changes = [
            "optim.lr=0.02",
            "run.steps=40",
            "run.eval_every=40",
            "run.save_every=40",
            "data.held_out=1",
        ]
        runs[kind] = tmp_path_factory.mktemp("runs") / kind
        train(shards, load_recipe("eagle3-tiny", [*changes, *own]), runs[kind], show=False)
    return runs


@pytest.mark.parametrize("kind", ["eagle1", "eagle3"])
def test_predicted_figures_of_answers_equal_the_measured_ones(
    target, tiny_target_dir, answered, trained, kind
):
    head = trained[kind] / "last"
    given = {"gamma": 3, "dtype": "fp32", "rows": range(len(QUESTIONS)), "show": False}
    predicted = predict(head, answered[0], str(tiny_target_dir), **given)
    measured = evaluate(head, target, QUESTIONS, [Chain(3)], max_new_tokens=24, show=False)
    names = ["tau", "rounds", "tokens", "accepted_histogram", "accepted_by_position", "tree"]
    for name in (*names, "tau_by_category", "tau_by_place", "tau_by_context"):
        assert predicted[name] == measured[name], name
    assert predicted["tau"] > 1.3
    assert all(count > 0 for count in predicted["accepted_histogram"][:3])
    json.dumps(predicted)


@pytest.mark.parametrize("kind", ["eagle1", "eagle3"])
@pytest.mark.parametrize(
    "draft",
    [Static(), Sampled((3, 2)), Chain(3, stop=0.2), Dynamic(9, 3, 4)],
    ids=["static", "ranks", "stop", "dynamic"],
)
def test_trees_and_stopping_chains_are_predicted_too(target, answered, trained, kind, draft):
    head = trained[kind] / "last"
    everything = range(open_shards(answered[1][kind]).num_rows)
    predicted = predict(head, answered[1][kind], draft=draft, rows=everything, show=False)
    measured = evaluate(head, target, QUESTIONS, [draft], max_new_tokens=24, show=False)
    names = ["tau", "rounds", "tokens", "tree", "tau_by_category", "tau_by_place", "tau_by_context"]
    if not isinstance(draft, Chain):
        names += ["accepted_histogram"]
    for name in names:
        assert predicted[name] == pytest.approx(measured[name]), name
    assert predicted["tau"] > 1.1


def test_a_sampled_chain_is_expected_to_take_the_rounds_it_took(target, answered, trained):
    """On greedy text both ways to look at it agree where the temperature is near 0."""
    shards, head = answered[1]["eagle3"], trained["eagle3"] / "last"
    everything = range(open_shards(shards).num_rows)
    cold = predict(head, shards, draft=Chain(3), sampling=Sampling(1e-3), rows=everything, show=False)
    greedy = predict(head, shards, draft=Chain(3), rows=everything, show=False)
    assert cold["tokens"] == greedy["tokens"]
    assert cold["rounds"] == pytest.approx(greedy["rounds"], abs=0.5)
    warm = predict(head, shards, draft=Chain(3), sampling=Sampling(1.0), rows=everything, show=False)
    assert 1 < warm["tau"] < 4
    assert warm["tau"] != pytest.approx(greedy["tau"], abs=0.05)
    assert "as expected" in "\n".join(predicted_lines(warm))
    assert {"1", "2-3", "4-7"} <= set(warm["tau_by_place"])
    assert all(1 <= tau <= 4 for key in ("place", "context") for tau in warm[f"tau_by_{key}"].values())
    assert "tau by context" in "\n".join(predicted_lines(warm))
    assert set(warm["tau_by_category"]) == {"moon", "none", "sea"}
    listed = ", ".join(f"{name} {warm['tau_by_category'][name]:.2f}" for name in ("moon", "sea", "none"))
    assert f"  tau by category           {listed}" in predicted_lines(warm)


@torch.inference_mode()
def test_a_text_that_its_law_cannot_write_is_refused_by_row_and_position(
    target, answered, tiny_target_dir, tmp_path
):
    """The last token of the second answer is another than the greedy one, the only one that top-k 1 draws."""
    file, head = tmp_path / "c.jsonl", tmp_path / "head"
    records = [json.loads(line) for line in answered[0].read_text().split("\n") if line]
    ids = records[1]["messages"][-1]["answer_ids"][:6]
    ids[5] = 40 if ids[5] != 40 else 41  # one byte each
    text = target.tokenizer.decode(ids, skip_special_tokens=True)
    records[1]["messages"][-1] = {
        "role": "assistant",
        "content": text,
        "answer_ids": ids,
        "finished": False,
    }
    write_records(target, records, file)
    save_head(some_head(target, "eagle1"), head)
    prepare([str(file)], str(tiny_target_dir), tmp_path / "rows", show=False)
    how = {"dtype": "fp32", "device": "cpu", "show": False}
    for codec in ("fp32", "bf16"):
        extract(
            tmp_path / "rows", str(tiny_target_dir), tmp_path / codec, features="eagle1", codec=codec, **how
        )
    shards = open_shards(tmp_path / "fp32")
    ((start, _),) = shards.spans[1]
    refused = (
        rf": row 1, position {start + 5}: a token of probability 0 at temperature 1, .* \(so are 1 of the"
    )
    for law in (Sampling(1.0, top_k=1), Sampling(1.0, top_p=0.01)):
        for texts, name in ((file, str(tiny_target_dir)), (tmp_path / "fp32", None)):
            with pytest.raises(UserError, match=f"^{re.escape(str(texts))}{refused}"):
                predict(head, texts, name, sampling=law, dtype="fp32", show=False)
    with pytest.raises(UserError, match=r"row 1, position"):  # too many for what rounding makes of an edge
        predict(head, tmp_path / "bf16", sampling=Sampling(1.0, top_k=1), show=False)
    kept = predict(head, tmp_path / "fp32", rows=[0, 2, 3], sampling=Sampling(1.0, top_k=1), show=False)
    assert 1 <= kept["tau"] <= 4


@pytest.fixture(scope="module")
def medusa(answered, tmp_path_factory) -> Path:
    """Medusa heads that know the greedy answers by heart."""
    changes = ["head.kind=medusa", "head.medusa_heads=2", "head.draft_vocab_size=null", "optim.lr=0.02"]
    changes += ["run.steps=40", "run.eval_every=40", "run.save_every=40", "data.held_out=1"]
    run = tmp_path_factory.mktemp("runs") / "medusa"
    train(answered[1]["eagle1"], load_recipe("eagle3-tiny", changes), run, show=False)
    return run / "last"


@pytest.mark.parametrize("temperature", [0.03, 1.0])
@pytest.mark.parametrize("draft", [Chain(2), Static(((0,), (1,), (0, 0), (0, 1)))], ids=["chain", "static"])
def test_medusas_guesses_of_a_sampled_text_stand_as_the_loop_says(
    target, medusa, draft, temperature, tiny_target_dir, tmp_path
):
    """They are no samples: given the token that was written, a guess of it stood for certain."""
    sampling, measured, records = Sampling(temperature, top_k=2), AcceptanceCounts(), []
    drafter = MedusaDrafter(load_head(medusa), target, draft)
    for seed, (question, conversation) in enumerate(conversations(target.tokenizer, QUESTIONS)):
        settings = Settings(max_new_tokens=40, sampling=sampling, seed=seed)
        made = generate(target, drafter, conversation.ask(0), settings)
        measured += made.counts
        records.append(record_of(target, question, made))
    write_records(target, records, tmp_path / "sampled.jsonl")
    given = {"draft": draft, "sampling": sampling, "dtype": "fp32", "show": False}
    predicted = predict(medusa, tmp_path / "sampled.jsonl", str(tiny_target_dir), **given)
    assert (predicted["rounds"], predicted["tokens"]) == (measured.rounds, measured.tokens)
    assert predicted["accepted_histogram"][: len(measured.histogram)] == list(measured.histogram)
    assert predicted["tau"] > (1.01 if temperature == 1 else 1.2)


def test_what_medusa_heads_cannot_draft_is_refused(target, answered):
    head = build_head(HeadConfig.for_target(target.config.to_dict(), "medusa", medusa_heads=2))
    for draft, words in (
        (Sampled((2,)), "a sampled draft: Medusa heads draft a chain or a static tree"),
        (Chain(2, stop=0.5), "a chain draft: Medusa heads"),
        (Chain(3), "a draft of depth 3 and 1 ranks: the head has 2 Medusa heads"),
    ):
        with pytest.raises(UserError, match=words):
            predict(head, answered[1]["eagle3"], draft=draft, show=False)


def test_what_depends_on_more_than_the_text_is_not_predicted(answered, trained):
    given = {"draft": Sampled(), "sampling": Sampling(1.0), "show": False}
    with pytest.raises(UserError, match="a sampled tree depends on more than the text"):
        predict(trained["eagle3"], answered[1]["eagle3"], **given)


@pytest.mark.parametrize("kind", ["eagle1", "eagle3"])
def test_a_run_is_predicted_on_the_rows_it_held_out(answered, trained, kind, tiny_target_dir):
    shards = open_shards(answered[1][kind])
    (held,) = split(shards.conversation_ids, 1)[1]
    run = trained[kind]
    report = predict(run, answered[1][kind], gamma=3, show=False)
    assert (report["which_rows"], report["rows"]) == ("held out from training", 1)
    chosen = predict(run, answered[1][kind], gamma=3, rows=[held], show=False)
    step = (run / "best").resolve().name.removeprefix("step-")
    assert f"{kind} head {run} (best, step {int(step)}), chain of 3, " in predicted_lines(report)[0]
    assert {**chosen, "which_rows": 0} == {**report, "which_rows": 0}
    texts = predict(run, answered[0], str(tiny_target_dir), gamma=3, dtype="fp32", show=False)
    named = {"texts": 0}  # of the same conversations as a file, prepared alike
    assert {**texts, **named} == {**report, **named}
    everything = predict(run, answered[1][kind], gamma=3, rows=range(shards.num_rows), show=False)
    assert everything["tokens"] > report["tokens"] > 0
    assert everything["tau"] > report["tau"]  # it knows the others by heart


def test_another_heads_shards_are_read_whole(tiny_shards_dir, target, tmp_path):
    save_head(some_head(target, "eagle3"), tmp_path / "head")
    report = predict(tmp_path / "head", tiny_shards_dir, gamma=2, show=False)
    shards = open_shards(tiny_shards_dir)
    assert report["which_rows"] == "all; no record tells which of them the head was trained on"
    assert report["rows"] == shards.num_rows
    assert report["tokens"] == sum(e - s for spans in shards.spans for s, e in spans)
    assert report["rounds"] == sum(report["accepted_histogram"])


def test_what_cannot_be_predicted_from_is_refused(tiny_shards_eagle1_dir, tiny_shards_dir, target, tmp_path):
    head = some_head(target, "eagle3")
    with pytest.raises(UserError, match="give --target"):
        predict(head, tmp_path / "answers.jsonl", show=False)
    with pytest.raises(UserError, match="features of eagle1, the head is eagle3"):
        predict(head, tiny_shards_eagle1_dir, show=False)
    with pytest.raises(UserError, match="chain: got 0 guesses"):
        predict(head, tiny_shards_dir, gamma=0, show=False)
    other = build_head(HeadConfig.for_target(target.config.to_dict(), "eagle3", feature_layers=(1, 2, 3)))
    with pytest.raises(UserError, match=r"captured layers \(2, 4, 5\), the head reads \(1, 2, 3\)"):
        predict(other, tiny_shards_dir, show=False)
    sizes = {**target.config.to_dict(), "vocab_size": 301}
    with pytest.raises(UserError, match="300 tokens, the head was made for 301"):
        predict(build_head(HeadConfig.for_target(sizes, "eagle3")), tiny_shards_dir, show=False)


def test_predicted_figures_are_kept_as_page_table_and_record(answered, trained, tmp_path, capsys):
    """The page draws what there is to draw: no speed, and categories only where rows have some."""
    from eagle_cli.main import main

    shards, files = answered[1]["eagle3"], [tmp_path / f"out.{ending}" for ending in ("html", "csv", "json")]
    options = [word for file in files for word in ("--report", str(file))]
    for warm, figures in (((), ("position", "accepted guesses")), (("--temperature", "1"), ())):
        with pytest.raises(SystemExit) as left:
            main(["eval", str(trained["eagle3"] / "last"), "--predict", str(shards), *options, *warm])
        assert left.value.code == 0
        assert f"written: {files[0]}, {files[1]}, {files[2]}" in capsys.readouterr().out
        (report,) = json.loads(files[2].read_text())["reports"]
        (row,) = csv.DictReader(io.StringIO(files[1].read_text()))
        assert (float(row["tau"]), row["speedup"], row["draft"]) == (report["tau"], "", "chain of 3")
        page = files[0].read_text()
        captions = re.findall("<figcaption>(.*?)</figcaption>", page)
        wanted = (*figures, "category", "tokens of the answer", "tokens of the text")
        assert len(captions) == len(wanted)
        for caption, words in zip(captions, wanted, strict=True):
            assert words in caption
        assert f">{html.escape(predicted_lines(report)[0])}" in page
        assert ">moon</text>" in page
