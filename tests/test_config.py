"""Recipes are strict, and every built-in one loads."""

from __future__ import annotations

import dataclasses
import inspect
import itertools
import json
import typing
from importlib.resources import files
from pathlib import Path

import pytest

from eagle_train import config
from eagle_train.config import SECTIONS, Recipe
from eagle_train.errors import UserError
from eagle_train.recipe_checks import recipe_from_dict
from eagle_train.recipe_files import load_recipe, recipe_names


def refused(name: str | Path, *overrides: str) -> str:
    with pytest.raises(UserError) as caught:
        load_recipe(name, overrides)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_the_built_in_recipes_are_the_promised_ones():
    assert recipe_names() == [
        "eagle1",
        "eagle1-vicuna-7b",
        "eagle3",
        "eagle3-llama3.1-8b",
        "eagle3-llama3.3-70b",
        "eagle3-qwen3-8b",
        "eagle3-smollm2",
        "eagle3-smollm2-long",
        "eagle3-tiny",
        "medusa",
    ]


@pytest.mark.parametrize("name", recipe_names())
def test_built_in_recipe_loads_survives_yaml_and_opens_with_its_story(name, tmp_path):
    recipe = load_recipe(name)
    (tmp_path / f"{name}.yaml").write_text(recipe.to_yaml())
    assert load_recipe(tmp_path / f"{name}.yaml") == recipe
    assert recipe.head.kind == name.split("-")[0]
    lines = (files("eagle_recipes") / f"{name}.yaml").read_text().splitlines()
    header = "\n".join(itertools.takewhile(lambda line: line.startswith("#"), lines))
    assert "# Reproduces:" in header
    assert f"--recipe {name} " in header
    assert "# Cost and result:" in header


@pytest.mark.parametrize("stage", [2, 3])
def test_deepspeed_files_are_valid(stage):
    value = json.loads((files("eagle_recipes") / f"deepspeed/zero{stage}.json").read_text())
    assert value["zero_optimization"]["stage"] == stage


def test_extends_overrides_only_what_it_names(tmp_path):
    (tmp_path / "base.yaml").write_text("extends: eagle3\noptim: {lr: 1e-4}\n")
    (tmp_path / "mine.yaml").write_text("extends: base.yaml\nloss: {ttt_steps: 5}\n")
    recipe = load_recipe(tmp_path / "mine.yaml", ["run.epochs=3", "head.layer_ids=[1, 2, 4]"])
    assert (recipe.optim.lr, recipe.loss.ttt_steps, recipe.loss.step_decay) == (1e-4, 5, 0.8)
    assert (recipe.run.epochs, recipe.head.layer_ids, recipe.name) == (3, (1, 2, 4), "mine")


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("optim.lrr=1e-4", "unknown key 'optim.lrr'; did you mean 'optim.lr'?"),
        ("optm.lr=1e-4", "unknown section 'optm'"),
        ("optm.lr=1e-4", "did you mean 'optim'?"),
        ("optim.lr=fast", "recipe eagle3: optim.lr: got 'fast', wanted a number"),
        ("optim.lr", "wanted SECTION.KEY=VALUE"),
        ("optim.name=adamm", "got 'adamm', wanted adamw or muon; did you mean 'adamw'?"),
        ("run.epochs=1.5", "run.epochs: got 1.5 (float), wanted a whole number"),
        ("run.epochs=true", "run.epochs: got True (bool), wanted a whole number"),
        ("head.fc_norm=1", "head.fc_norm: got 1 (int), wanted true or false"),
        ("optim.betas=[0.9]", "optim.betas: got [0.9], wanted a list of 2"),
        ("run.epochs=null", "no end; set one of"),
        ("run.seed=99999999999999999999", "run.seed: got a whole number of 67 bits, wanted one below 2**63"),
        ("run.epochs=1.0e+30", "run.epochs: got a whole number of 100 bits"),
        (f"optim.lr={'9' * 400}", "optim.lr: got a whole number of 1329 bits"),
        (f"optim.lr={'9' * 9000}", "not valid YAML"),
        ("run.epochs=.inf", "run.epochs: got inf (float), wanted a whole number"),
        ("optim.lr=2026-13-45", "not valid YAML"),
        ("data.tokens_per_step=null", "exactly one of tokens_per_step and rows_per_step"),
        ("head.kind=eagle1", "head.draft_vocab_size: kind eagle1 has none; remove it"),
        ("optim.lr=0", "learning rates must be above 0"),
        ("optim.ema=1", "ema must lie in [0, 1)"),
        ("schedule.decay_share=0", "decay_share: wanted a share above 0"),
        ("loss.divergence=kll", "wanted cross_entropy or kl or reverse_kl or tv or lk; did you mean 'kl'?"),
        ("optim.lr=nan", "optim.lr: got nan, wanted a number of 0 or more"),
        ("run.eval_every=0", "run.eval_every: got 0, wanted 1 or more"),
        ("data.held_out=2.5", "data.held_out: got 2.5, wanted a share below 1 or a whole number"),
        ("optim.lr=[", "--set optim.lr=[: not valid YAML"),
        (f"optim.betas={'[' * 9000}", "not valid YAML"),
        ("run.minutes=1e307", "run.minutes: got 1e+307, wanted at most 527040"),
        ("loss.step_decay=1e300", "loss.step_decay: got 1e+300, wanted at most 1"),
        ("optim.matrix_lr=1e30", "optim.matrix_lr: got 1e+30, wanted at most 10"),
        ("head.intermediate_size=99999999999", "head.intermediate_size: got 99999999999, wanted at most"),
        ("head.layer_ids=[5,2]", "recipe eagle3: head.layer_ids: got [5, 2], wanted distinct layers of 0 or"),
        ("head.layer_ids=[2,2]", "head.layer_ids: got [2, 2], wanted distinct layers"),
        ("head.layer_ids=[-1,2]", "head.layer_ids: got [-1, 2], wanted distinct layers"),
        ("head.num_hidden_layers=1000000", "head.num_hidden_layers: got 1000000, wanted at most 128"),
    ],
)
def test_a_wrong_setting_is_one_line_naming_what_is_wanted(override, words):
    assert words in refused("eagle3", override)


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["loss.divergence=lk", "loss.top_k_weight=1"], "belongs to divergence cross_entropy, got lk"),
        (["run.patience=3", "data.held_out=0"], "run.patience: needs held-out conversations"),
    ],
)
def test_settings_that_cannot_go_together_are_refused(overrides, words):
    assert words in refused("eagle3", *overrides)
    assert "needs a loss.token_weight" in refused("eagle1", "loss.top_k_weight=1", "loss.token_weight=0")
    for recipe in ("eagle3", "medusa"):  # which have no such weight
        assert load_recipe(recipe, ["loss.top_k_weight=1", "loss.token_weight=0"]).loss.top_k_weight == 1


def test_files_are_refused_by_name_and_key(tmp_path):
    bad = tmp_path / "bad.yaml"
    bad.write_text("optim:\n  learning_rate: 1\n")
    assert f"{bad.resolve()}: unknown key 'optim.learning_rate'" in refused(bad)
    bad.write_text("- 1\n")
    assert "holds a list, wanted sections" in refused(bad)
    bad.write_text("optim: 3\n")
    assert "optim: got 3, wanted keys and values" in refused(bad)
    bad.write_text("extends: bad.yaml\n")
    assert "extends itself" in refused(bad)
    assert "did you mean 'eagle3'" in refused("eagel3")
    assert "recipe 'none.yaml': no such file" in refused("none.yaml")


def test_a_recipe_that_extends_nothing_takes_the_defaults(tmp_path):
    (tmp_path / "mine.yaml").write_text("head: {kind: eagle3}\nrun: {steps: 2}\n")
    mine = load_recipe(tmp_path / "mine.yaml")
    assert (mine.run.steps, mine.data.held_out, mine.loss.ttt_steps) == (2, 64, 7)
    (tmp_path / "mine.yaml").write_text("")
    assert "run: no end" in refused(tmp_path / "mine.yaml")
    assert "cannot be read" in refused("x" * 5000)


def test_a_default_has_the_type_that_its_key_says():
    for section, factory in SECTIONS.items():
        for key, hint in typing.get_type_hints(factory).items():
            if hint in (int, float, bool):
                assert type(getattr(factory(), key)) is hint, f"{section}.{key}"


def test_medusa_heads_speak_the_whole_vocabulary():
    assert load_recipe("medusa").head.draft_vocab_size is None


def test_numbers_without_a_dot_are_numbers():
    assert load_recipe("eagle3", ["optim.lr=1e-4"]).optim.lr == 1e-4


def test_dicts_round_trip():
    recipe = load_recipe("eagle3-smollm2")
    assert recipe_from_dict(recipe.to_dict(), recipe.name) == recipe
    assert isinstance(recipe, Recipe)


def lengths(recipe: Recipe) -> tuple:
    run = recipe.run
    return run.epochs, run.steps, run.tokens, run.minutes


def test_alternatives_replace_each_other_from_layer_to_layer(tmp_path):
    """A length of the run, or the size of a step, drops what the layers below chose instead of it."""
    assert lengths(load_recipe("eagle3", ["run.tokens=1000"])) == (None, None, 1000, None)
    both = load_recipe("eagle3", ["run.tokens=1000", "run.minutes=5"])
    assert lengths(both) == (None, None, 1000, 5)
    (tmp_path / "mine.yaml").write_text(
        "extends: eagle3-smollm2\nrun: {steps: 7}\ndata: {rows_per_step: 2}\n"
    )
    mine = load_recipe(tmp_path / "mine.yaml")
    assert lengths(mine) == (None, 7, None, None)
    assert (mine.data.tokens_per_step, mine.data.rows_per_step) == (None, 2)
    assert lengths(load_recipe(tmp_path / "mine.yaml", ["run.minutes=3"])) == (None, None, None, 3)
    with pytest.raises(UserError, match="more than one of epochs, steps, tokens"):
        load_recipe("eagle3", ["run.tokens=1000", "run.steps=5"])


def test_extends_is_looked_up_beside_the_recipe_and_then_among_the_built_in(tmp_path, monkeypatch):
    here, there = tmp_path / "here", tmp_path / "there"
    for folder, lr in ((here, 1), (there, 2)):
        folder.mkdir()
        (folder / "base.yaml").write_text(f"extends: eagle3\noptim: {{lr: {lr}}}\n")
        (folder / "eagle3").write_text("optim: {lr: 77}\n")
    (there / "mine.yaml").write_text("extends: base.yaml\n")
    (there / "eagle3").unlink()
    monkeypatch.chdir(here)
    assert load_recipe("../there/mine.yaml").optim.lr == 2
    (there / "base.yaml").unlink()
    words = refused("../there/mine.yaml")
    assert words.startswith(
        f"{there / 'mine.yaml'}: extends 'base.yaml': no such file and no built-in recipe"
    )


def test_a_run_with_a_length_that_is_not_whole_is_one_line(tmp_path):
    (tmp_path / "recipe.yaml").write_text("run: {steps: 8.5}\n")
    assert "recipe recipe: run.steps: got 8.5 (float), wanted a whole number" in refused(
        tmp_path / "recipe.yaml"
    )


def test_every_key_says_in_its_line_what_it_means():
    lines = inspect.getsource(config).splitlines()
    for section, factory in SECTIONS.items():
        first = next(i for i, line in enumerate(lines) if line.startswith(f"class {factory.__name__}"))
        for field in dataclasses.fields(factory):
            at = next(i for i in range(first, len(lines)) if lines[i].startswith(f"    {field.name}: "))
            assert "  # " in lines[at] or lines[at - 1].startswith("    # "), f"{section}.{field.name}"
