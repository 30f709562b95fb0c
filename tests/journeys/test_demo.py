"""``eagle demo`` whole, with a tiny target in the place of the small one."""

from __future__ import annotations

import json

import pytest

import eagle_train.demo as demo_module
from eagle_train.decoding.shapes import Chain, Dynamic


@pytest.fixture
def demo(monkeypatch, capsys, tiny_target_dir, tiny_conversations):
    """Return a function that runs ``eagle demo --out OUT ...`` and returns exit code, stdout and stderr."""
    monkeypatch.setattr(demo_module, "small_target", lambda: tiny_target_dir)
    monkeypatch.setattr(demo_module, "built_in_conversations", lambda: tiny_conversations)
    monkeypatch.setattr(demo_module, "RECIPE", "eagle3-tiny")
    monkeypatch.setattr(demo_module, "NUM_QUESTIONS", 2)
    monkeypatch.setattr(demo_module, "NEW_TOKENS", 12)
    monkeypatch.setattr(demo_module, "CHAIN", Chain(2))
    monkeypatch.setattr(demo_module, "TREE", Dynamic(total_tokens=8, top_k=3, depth=2))

    def run(out, *words):
        from eagle_cli.main import main

        with pytest.raises(SystemExit) as caught:
            main(["demo", "--out", str(out), *words])
        return caught.value.code or 0, *capsys.readouterr()

    return run


def test_the_demo_makes_everything_and_shows_it_in_80_columns(demo, tmp_path, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    code, shown, _ = demo(tmp_path / "my demo")
    assert code == 0
    for words in ("plain decoding", "untrained, chain of", "trained, chain of 2", "trained, tree of 8 nodes"):
        assert words in shown
    assert shown.count("2 of 2") == 2
    assert f"'{tmp_path}/my demo/head'" in shown  # what to type next can be copied
    for name in ("rows/rows.json", "shards/shards.json", "run/best", "head/config.json"):
        assert (tmp_path / "my demo" / name).exists()
    report = json.loads((tmp_path / "my demo" / "demo.json").read_text())
    assert report["untrained_tau"] >= 1
    assert [result["lossless"] for result in report["evaluation"]["results"]] == [True, True]


def test_a_repeated_demo_keeps_what_is_done_and_decodes_anew(demo, tmp_path):
    assert demo(tmp_path / "demo")[0] == 0
    made = {
        file: file.stat().st_mtime_ns
        for pattern in ("rows/*.arrow", "shards/shard-*.safetensors", "run/checkpoints/*/*.safetensors")
        for file in (tmp_path / "demo").glob(pattern)
    }
    assert len(made) >= 3
    code, shown, _ = demo(tmp_path / "demo", "--json")
    assert code == 0
    assert json.loads(shown)["evaluation"]["prompts"] == 2
    assert {file: file.stat().st_mtime_ns for file in made} == made
