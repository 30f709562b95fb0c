"""Methods side by side, question sets by temperatures, and the files that hold their figures."""

from __future__ import annotations

import csv
import io
import json
import re
import xml.etree.ElementTree as ET

import pytest
import torch
from matplotlib.figure import Figure

from eagle_cli.main import main
from eagle_train.decoding import loop
from eagle_train.decoding.law import TargetLaw
from eagle_train.decoding.lookahead import Lookahead
from eagle_train.decoding.loop import Settings
from eagle_train.decoding.sampling import Sampling
from eagle_train.evaluation import comparison
from eagle_train.evaluation.evaluate import evaluate
from eagle_train.evaluation.methods import Method, Sizes, entries_of
from eagle_train.evaluation.page import _histogram, as_page
from eagle_train.evaluation.questions import Question
from eagle_train.evaluation.report import lines, short_sources
from eagle_train.evaluation.tables import as_csv, as_lines
from eagle_train.evaluation.turns import Asked
from eagle_train.heads.config import HeadConfig
from eagle_train.heads.disk import build_head, save_head
from eagle_train.progress import Progress
from eagle_train.targets.load import Target

QUESTIONS = [
    Question("a", "sea", ("Why is the sea deep? deep? deep?",)),
    Question("b", "<bread>", ("Bake!",)),
]


@pytest.fixture(scope="module")
def heads(target: Target, tmp_path_factory) -> dict[str, str]:
    torch.manual_seed(0)
    folders = {}
    for kind in ("eagle1", "eagle3"):
        folders[kind] = str(tmp_path_factory.mktemp("heads") / kind)
        save_head(build_head(HeadConfig.for_target(target.config.to_dict(), kind)), folders[kind])
    return folders


@pytest.fixture(scope="module")
def reports(target, heads, tiny_target_dir) -> list[dict]:
    """Every method, greedy and sampled."""
    texts = ["plain", "prompt-lookup", "lookahead", f"draft-model={tiny_target_dir}"]
    texts += [f"eagle1={heads['eagle1']}", f"eagle2={heads['eagle1']}", f"eagle3={heads['eagle3']}"]
    methods = [Method.parse(text) for text in texts]
    return [
        {
            "set": "made up",
            **evaluate(
                None,
                target,
                QUESTIONS,
                methods=methods,
                sizes=Sizes(gamma=2, window=3, level=3, guesses=2),
                sampling=Sampling(temperature),
                max_new_tokens=12,
                show=False,
            ),
        }
        for temperature in (0.0, 1.0)
    ]


def test_every_method_answers_the_same_prompts_by_one_loop(reports):
    greedy, sampled = reports
    names = ["prompt-lookup", "lookahead", "draft-model", "eagle1", "eagle2", "eagle3"]
    for report in reports:
        assert [result["method"] for result in report["results"]] == names
        assert (report["head"], report["kind"]) == (None, None)
    drafts = {result["method"]: result["tree"]["draft"] for result in greedy["results"]}
    assert (drafts["eagle1"], drafts["eagle2"], drafts["eagle3"]) == ("static", "dynamic", "dynamic")
    for result in greedy["results"]:
        assert result["lossless"] is True
        assert result["tokens"] == greedy["plain"]["tokens"] - 2
    own = next(result for result in greedy["results"] if result["method"] == "draft-model")
    assert own["accepted_by_position"][0] == 1  # the target is its own draft model here
    assert 2.5 < own["tau"] <= 3
    assert all(result["lossless"] is None for result in sampled["results"])


def test_the_targets_law_is_asked_for_where_a_rule_looks_alone(target, monkeypatch):
    """Lookahead's own window is read by the target, but no rule needs its law there."""
    asked = []

    class Law(TargetLaw):
        def __init__(self, target, sampling, text, tree, last, begun):
            asked.append((len(last), len(tree), tree.own))
            super().__init__(target, sampling, text, tree, last, begun)

    monkeypatch.setattr(loop, "TargetLaw", Law)
    settings = Settings(max_new_tokens=16, eos_ids=())
    made = loop.generate(target, Lookahead(target, window=3, level=3, guesses=2), [5, 17, 250], settings)
    assert made.ids == loop.plain(target, [5, 17, 250], settings).ids
    assert all(own > 0 and rows == nodes - own for rows, nodes, own in asked)


def test_progress_moves_within_an_answer(target, monkeypatch):
    heard = []

    class Bar(Progress):
        def advance(self, count: int = 1, note: str = "") -> None:
            heard.append((count, note))

    monkeypatch.setattr(comparison, "_SECONDS_BETWEEN_NOTES", -1.0)
    entries = entries_of(Method("prompt-lookup"), target, None, Sampling(), Sizes())
    run = comparison.Comparison(
        target, entries, Settings(max_new_tokens=5, eos_ids=()), Bar("eval", 10, "tokens")
    )
    run.answer(Asked([5, 17, 250], "question a", 0, "", 0))
    assert {count for count, note in heard if note.startswith("warming up")} == {0}
    assert (1, "question a, plain: 3 tokens") in heard
    assert any(count > 0 and note.startswith("question a, prompt-lookup: ") for count, note in heard)
    assert sum(count for count, _ in heard) == 10  # five of each method


def test_acceptance_is_told_by_place_and_by_the_length_of_the_text(reports):
    for result in reports[0]["results"]:
        assert set(result["tau_by_place"]) <= {"1", "2-3", "4-7", "8-15"}
        assert result["tau_by_place"]["1"] >= 1
        assert all(1 <= tau <= result["tree"]["depth"] + 1 for tau in result["tau_by_context"].values())


def test_the_table_holds_every_method_under_every_temperature(reports):
    shown = as_lines(reports)
    assert shown[0].split("  ")[-1].strip() == "made up, T=1"
    assert len(shown) == 2 + 6
    assert shown[1].startswith("plain ")
    for line, result in zip(shown[2:], reports[0]["results"], strict=True):
        assert f"{result['tau']:.2f}, {result['speedup']:.2f}x" in line
    table = list(csv.DictReader(io.StringIO(as_csv(reports))))
    assert len(table) == 2 * (1 + 6)
    assert [row["method"] for row in table[:3]] == ["plain", "prompt-lookup", "lookahead"]
    assert float(table[1]["tau"]) == reports[0]["results"][0]["tau"]


def test_bars_of_a_count_stand_about_its_mark(reports):
    axes = Figure().subplots()
    _histogram(axes, reports[0])
    bars = [(bar.get_x(), bar.get_x() + bar.get_width()) for group in axes.containers for bar in group[1:2]]
    assert len(bars) == 6
    assert (min(left for left, _ in bars) + max(right for _, right in bars)) / 2 == pytest.approx(1)


def test_two_ways_by_one_method_are_told_apart_by_what_they_read(target):
    methods = [Method.parse(f"draft-model=first:{number}") for number in (1, 2)]
    made = evaluate(
        None, target, QUESTIONS[:1], methods=methods, sizes=Sizes(gamma=2), max_new_tokens=4, show=False
    )
    text, table, page = "\n".join(lines(made)), as_lines([made]), as_page([made])
    for number in (1, 2):
        name = f"draft-model=first:{number}, chain of 2"
        assert f"\n{name}\n  acceptance length" in text
        assert table[1 + number].startswith(f"{name}  ")
        assert page.count(f">{name}<") >= 4  # in the table and in the plots
        assert f"{name}: the tree of one round" in page
    told = [row["source"] for row in csv.DictReader(io.StringIO(as_csv([made])))]
    assert told == ["", "first:1", "first:2"]


def test_a_source_is_shortened_as_far_as_it_stays_itself():
    sources = ["/a/one/head", "/a/two/head", "/a/two/head", "first:3", None]
    named = short_sources([{"source": source} for source in sources])
    assert named == {"/a/one/head": "one/head", "/a/two/head": "two/head", "first:3": "first:3"}
    assert short_sources([{"source": "run"}, {"source": "run/"}]) == {"run": "run", "run/": "run/"}
    assert short_sources([{"source": None}]) == {}


def test_the_page_stands_alone_and_its_plots_and_trees_are_drawn(reports):
    page = as_page(reports)
    assert "http-equiv" not in page
    assert not re.search(r"<(script|link|img)\b|\bsrc=", page)
    pictures = re.findall(r"<svg.*?</svg>", page, flags=re.S)
    rounds = sum(result["a_round"] is not None for report in reports for result in report["results"])
    assert len(pictures) == 2 * 6 + rounds
    assert rounds >= 6
    referred: set[str] = set()
    for picture in pictures:
        drawn = ET.fromstring(picture)
        left, top, width, height = map(float, drawn.attrib["viewBox"].split())
        assert (left, top) == (0, 0)  # and what is drawn lies inside, so that no window cuts it off
        for circle in drawn.findall("{*}circle"):
            assert 0 < float(circle.attrib["cx"]) < width
            assert 0 < float(circle.attrib["cy"]) < height
        own = set(re.findall(r'href="#(\w+)"|url\(#(\w+)\)', picture)) - {("", "")}
        assert not referred & own  # ids on one page are each picture's own
        referred |= own
    assert page.count("<td>equal to plain decoding on every prompt</td>") == 6
    assert page.count("<td>sampled: the target") == 6
    own = next(r for r in reports[0]["results"] if r["method"] == "draft-model")["a_round"]
    assert own["accepted"] == [1, 2]
    assert own["parents"] == [-1, 0, 1]
    assert "&lt;bread&gt;" in page
    assert "<bread>" not in page


def eagle(*arguments: object) -> int:
    with pytest.raises(SystemExit) as left:
        main([str(argument) for argument in arguments])
    return int(left.value.code or 0)


def test_one_command_compares_methods_over_sets_and_temperatures(heads, tiny_target_dir, tmp_path, capsys):
    for name in ("one", "two"):
        line = {"question_id": 1, "category": "c", "turns": [f"Why {name}?"]}
        (tmp_path / f"{name}.jsonl").write_text(json.dumps(line))
    files = [tmp_path / f"out.{ending}" for ending in ("html", "csv", "json")]
    code = eagle(
        *(
            "eval",
            heads["eagle3"],
            "--target",
            tiny_target_dir,
            "--max-new-tokens",
            6,
            "--method",
            "prompt-lookup",
        ),
        *("--questions", tmp_path / "one.jsonl", "--questions", tmp_path / "two.jsonl"),
        *("--temperature", 0, "--temperature", 1, "--draft", "chain", "--gamma", 2, "--block"),
        *(word for file in files for word in ("--report", file)),
    )
    out = capsys.readouterr().out
    assert code == 0
    assert "one, T=0" in out
    assert "two, T=1" in out
    assert out.splitlines()[-1] == f"next: eagle export {heads['eagle3']} --engine vllm --out served/"
    assert files[0].read_text().startswith("<!doctype html>")
    assert len(files[1].read_text().splitlines()) == 1 + 4 * 3
    reports = json.loads(files[2].read_text())["reports"]
    assert [(r["set"], r["temperature"]) for r in reports] == [("one", 0), ("one", 1), ("two", 0), ("two", 1)]
    assert reports[0]["results"][0]["tree"]["depth"] == reports[0]["results"][1]["tree"]["depth"] == 2


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((), "got neither a head nor a method"),
        (("--method", "lookahed"), "did you mean 'lookahead'?"),
        (("--method", "draft-model"), "needs a model; give --method draft-model=DIR"),
        (("--method", "eagle3"), "needs a head; give --method eagle3=DIR"),
        (("--method", "plain=x"), "wanted plain alone, it reads nothing"),
        (("--method", "eagle1=HEAD"), "an eagle3 head, wanted eagle1; give --method eagle3="),
        (("--method", "prompt-lookup", "--window", "3"), "--window 3: a size of lookahead"),
        (("--method", "lookahead", "--level", "1"), "lookahead: got level 1"),
        (
            ("--method", "lookahead", "--report", "x/y.html/"),
            "--report x/y.html/: is a folder; give --report",
        ),
        (("--method", "lookahead", "--report", "x.pdf"), "--report x.pdf: wanted a file ending in"),
        (("--method", "lookahead", "--top-p", "0"), "top-p: got 0.0"),
        (("--method", "lookahead", "--top-p", "nan"), "top-p: got nan"),
        (("--method", "lookahead", "--temperature", "inf"), "temperature: got inf"),
        (("--method", "lookahead", "--repetition-penalty", "-1"), "repetition-penalty: got -1"),
        (("--method", "lookahead", "--questions", "gsm9k"), "did you mean 'gsm8k'?"),
        (("HEAD", "--draft", "none.json"), "none.json"),
    ],
)
def test_what_the_user_must_change_is_one_line(heads, tiny_target_dir, capsys, arguments, words):
    arguments = tuple(word.replace("HEAD", heads["eagle3"]) for word in arguments)
    assert eagle("eval", *arguments, "--target", tiny_target_dir) == 2
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert error.startswith("error: ")
    assert words in error
