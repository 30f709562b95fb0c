"""README.md and docs/: links lead somewhere, options and settings exist, files have the form that is said."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path

import pytest
import typer

from eagle_cli import main as main_module
from eagle_train.config import SECTIONS
from eagle_train.data.conversations import read_record
from eagle_train.decoding.shapes import read_shape
from eagle_train.evaluation.questions import read_questions
from eagle_train.recipe_files import load_recipe

_ROOT = Path(__file__).resolve().parents[2]
_PAGES = [_ROOT / "README.md", *sorted((_ROOT / "docs").glob("*.md"))]
_EACH_PAGE = pytest.mark.parametrize("page", _PAGES, ids=lambda page: page.name)
_README = _PAGES[0].read_text()


def _anchors(page: Path) -> set[str]:
    """Return the names under which a page's headings are linked."""
    heads = re.findall(r"^#+ (.*)$", page.read_text(), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", head.lower()).replace(" ", "-") for head in heads}


@_EACH_PAGE
def test_links_lead_to_files_and_headings_that_exist(page):
    links = re.findall(r"\]\(([^)]+)\)", page.read_text())
    for link in links:
        path, _, anchor = link.partition("#")
        to = page.parent / path if path else page
        assert to.is_file(), link
        assert not anchor or anchor in _anchors(to), link


def test_the_readme_links_every_page_and_is_short():
    for page in _PAGES[1:]:
        assert f"(docs/{page.name})" in _README
    assert len(_README.splitlines()) <= 330


@_EACH_PAGE
def test_every_option_that_is_named_is_some_commands(page):
    group = typer.main.get_command(main_module.app)
    known = {opt for command in group.commands.values() for one in command.params for opt in one.opts}  # type: ignore[attr-defined]
    named = set(re.findall(r"(?<![\w-])--[a-z][a-z-]*", page.read_text()))
    assert named <= {*known, "--help", "--growth"}  # the last is of scripts/bench_train.py


@_EACH_PAGE
def test_every_setting_and_file_that_is_named_exists(page):
    text = page.read_text()
    for section, key in re.findall(rf"`({'|'.join(SECTIONS)})\.(\w+)[=`]", text):
        assert key in {field.name for field in dataclasses.fields(SECTIONS[section])}, f"{section}.{key}"  # type: ignore[arg-type]
    for name in re.findall(r"`((?:scripts|eagle_train|recipes|tests|cli)/[\w./-]+)`", text):
        assert (_ROOT / name).exists(), name
    targets = re.findall(r"^([a-z-]+):", (_ROOT / "Makefile").read_text(), flags=re.MULTILINE)
    assert set(re.findall(r"`make ([a-z-]+)", text)) <= set(targets)


def _shown(start: str) -> list[str]:
    """Return what stands in code in the row of the table of files that begins so."""
    (row,) = [line for line in _README.splitlines() if line.startswith(f"| {start}")]
    return re.findall(r"`([^`]*)`", row)


def test_the_forms_of_files_are_those_that_are_read(tmp_path):
    conversations = [json.loads(one) for one in _shown("`DATA`") if one.startswith("{")]
    assert len(conversations) == 2
    for record in conversations:
        read = read_record(record, "here").messages()
        assert [(one["role"], one["content"]) for one in read] == [("user", "Hi"), ("assistant", "Hello")]
    line = next(one for one in _shown("`--questions FILE`") if one.startswith("{"))
    (tmp_path / "q.jsonl").write_text(f"{line}\n" + '{"turns": ["alone"]}\n')
    first, second = read_questions(tmp_path / "q.jsonl")
    assert (first.id, first.category, first.turns) == ("1", "math", ("first turn", "second turn"))
    assert second.turns == ("alone",)
    extends, run = _shown("`--recipe FILE.yaml`")[2:4]
    (tmp_path / "my.yaml").write_text(f"{extends}\n{run}\n")
    assert load_recipe(str(tmp_path / "my.yaml"), []).run.epochs == 2
    shape = next(one for one in _shown("`--draft FILE.json`") if one.startswith("{"))
    (tmp_path / "tuned.json").write_text(shape)
    assert read_shape(tmp_path / "tuned.json").figures["depth"] == 5
