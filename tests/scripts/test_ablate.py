"""Variants are trained once, scored on the same conversations, and compared with their uncertainty."""

from __future__ import annotations

import pytest

from eagle_train.errors import UserError

SETTINGS = ["run.steps=4", "data.held_out=4"]


def test_variants_are_trained_scored_and_kept(script, tmp_path, tiny_shards_dir):
    ablate = script("ablate")
    texts = ["as it is:", "one step: loss.ttt_steps=1, optim.lr=5e-3", f"again: shards={tiny_shards_dir}"]
    variants = [ablate.Variant.of(text, tiny_shards_dir) for text in texts]
    lines = ablate.run_all(variants, "eagle3-tiny", SETTINGS, 2, tmp_path, show=False)
    assert [line["variant"] for line in lines] == ["as it is", "one step", "again"]
    assert lines[2]["tau"] == lines[0]["tau"], "the same training on the same shards"
    assert lines[0]["difference"] == 0
    for line in lines:
        assert line["tau_interval"][0] <= line["tau"] <= line["tau_interval"][1]
        assert min(line["taus"]) <= line["tau"] <= max(line["taus"])
    written = {p: p.stat().st_mtime_ns for p in tmp_path.rglob("model.safetensors")}
    assert ablate.run_all(variants, "eagle3-tiny", SETTINGS, 2, tmp_path, show=False) == lines
    assert {p: p.stat().st_mtime_ns for p in tmp_path.rglob("model.safetensors")} == written
    assert "| one step | 2 |" in ablate.as_markdown(lines)


def test_heads_are_scored_on_every_row_of_other_shards(script, tmp_path, tiny_shards_dir):
    ablate = script("ablate")
    settings = [*SETTINGS, "run.seed=0"]
    for text in ("of all:", f"of its own: on={tiny_shards_dir}"):
        on = tiny_shards_dir if text == "of all:" else tmp_path / "none"
        variant = ablate.Variant.of(text, tiny_shards_dir, on)
        assert (variant.on, variant.settings) == (tiny_shards_dir, ())
    (line,) = ablate.run_all([variant], "eagle3-tiny", settings, 1, tmp_path, show=False)
    found = ablate.score(tmp_path / "of-its-own-0", variant, ablate.load_recipe("eagle3-tiny", settings))
    shards = ablate.open_shards(tiny_shards_dir)
    assert found.keys() == set(shards.conversation_ids)
    assert line["tau"] == sum(t for _, t in found.values()) / sum(r for r, _ in found.values())


def test_the_intervals_tell_a_real_difference_from_none(script):
    """30 conversations of 100 rounds, each with its own difficulty that all variants share."""
    ablate = script("ablate")

    def runs(gain):
        return [
            {f"c{i}": (100, 120 + 2 * i + gain + (i * 7 + seed) % 5) for i in range(30)} for seed in range(3)
        ]

    plain, same, better = ablate.table({"plain": runs(0), "same": runs(0), "better": runs(8)})
    assert same["difference_interval"][0] <= 0 <= same["difference_interval"][1]
    assert better["difference"] == pytest.approx(0.08)
    assert 0 < better["difference_interval"][0] < 0.08 < better["difference_interval"][1]
    spread = [line["tau_interval"][1] - line["tau_interval"][0] for line in (plain, better)]
    assert better["difference_interval"][1] - better["difference_interval"][0] < 0.5 * min(spread), "paired"


def test_other_conversations_and_nameless_variants_are_refused(script, tmp_path):
    ablate = script("ablate")
    with pytest.raises(UserError, match="two: scored on other conversations"):
        ablate.table({"one": [{"a": (1, 1)}], "two": [{"b": (1, 1)}]})
    with pytest.raises(UserError, match="wanted NAME: KEY=VALUE"):
        ablate.Variant.of("loss.ttt_steps=1", tmp_path)
