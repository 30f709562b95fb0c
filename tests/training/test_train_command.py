"""``eagle train`` as typed: exit codes, one line of what to do, and the next command."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys

import pytest

from eagle_train.training import dry_run
from eagle_train.training.metrics import read_metrics


def eagle(*words: str, **environment: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-m", "eagle_cli.main", *map(str, words)],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=300,
    )


def main_here(capsys, *words: str) -> tuple[int, str, str]:
    """Run the command in this process; return exit code, stdout and stderr."""
    from eagle_cli.main import main

    with pytest.raises(SystemExit) as caught:
        main([str(word) for word in words])
    out, err = capsys.readouterr()
    return int(caught.value.code or 0), out, err


def test_a_misspelt_recipe_key_is_exit_2_with_the_nearest_name_and_starts_nothing(tmp_path, tiny_shards_dir):
    done = eagle(
        "train", tiny_shards_dir, "--recipe", "eagle3", "--set", "optim.lrr=1", "--out", tmp_path / "run"
    )
    assert done.returncode == 2
    assert done.stderr == "error: --set: unknown key 'optim.lrr'; did you mean 'optim.lr'?\n"
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--recipe", "eagel3"], "did you mean 'eagle3'?"),
        (["--recipe", "eagle3-tiny", "--track", "wandbb"], "did you mean 'wandb'?"),
        (
            ["--recipe", "eagle3-tiny", "--deepspeed", "zero2"],
            "partitions over processes; give --processes 2",
        ),
        (["--recipe", "eagle3-tiny", "--init-from", "nope"], "nope: no such folder; wanted a head or a run"),
        (["--recipe", "eagle1"], "features of eagle3; recipe eagle1 trains eagle1"),
        (["--recipe", "eagle3-tiny", "--resume"], "holds no run"),
        (["--recipe", "eagle3-tiny", "--resume", "--dry-run"], "leave one of the two out"),
        (["--recipe", "eagle3-tiny", "--processes", "0"], "wanted 1 or more"),
    ],
)
def test_what_the_user_must_change_is_one_line_and_exit_2(words, message, tmp_path, tiny_shards_dir, capsys):
    code, _, err = main_here(capsys, "train", tiny_shards_dir, *words, "--out", tmp_path / "run")
    assert code == 2
    assert err.count("\n") == 1
    assert err.startswith("error: ")
    assert message in err


@pytest.mark.parametrize("device", ["banana", "cuda"])
def test_a_device_of_the_target_is_refused_by_the_option_that_train_has(
    device, tmp_path, tiny_rows_dir, tiny_target_dir, capsys, monkeypatch
):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    for mode in (["--online"], ["--max-disk", "1GB"]):
        words = ["train", tiny_rows_dir, *mode, "--target", tiny_target_dir, "--target-device", device]
        code, _, err = main_here(capsys, *words, "--recipe", "eagle3-tiny", "--out", tmp_path / "run")
        assert code == 2
        assert err.startswith(f"error: --target-device {device}: ")
        assert " --device" not in err


def test_it_ends_with_what_it_made_and_the_next_command(tmp_path, tiny_shards_dir, tiny_target_dir, capsys):
    words = ["train", tiny_shards_dir, "--recipe", "eagle3-tiny", "--out", tmp_path / "run"]
    code, out, err = main_here(capsys, *words)
    assert code == 0
    made, following = out.splitlines()
    assert made.startswith(f"{tmp_path / 'run'}: 8 steps")
    assert "chain of 3, predicted on 2 held-out conversations (so few give a rough figure); exact for" in made
    assert following == (
        f"next: eagle eval {tmp_path / 'run'} --target {tiny_target_dir} --draft chain --num-questions 10"
    )
    assert "22 rows to train on, 2 held out" in err
    assert "warm-up" not in err
    code, out, err = main_here(capsys, *words, "--json")
    summary = json.loads(out)
    assert (code, summary["steps"]) == (0, 8)
    assert "going on from step 8, where it is finished" in err


def test_a_warm_up_that_fills_the_run_is_said(tmp_path, tiny_shards_dir, capsys):
    words = ["train", tiny_shards_dir, "--recipe", "eagle3-tiny", "--set", "schedule.warmup_steps=5"]
    code, _, err = main_here(capsys, *words, "--out", tmp_path / "run")
    assert code == 0
    assert "warm-up takes 5 steps, the run has 8, so little is learned" in err


def test_an_interrupt_saves_says_how_to_go_on_and_is_exit_130(
    tmp_path, tiny_shards_dir, capsys, interrupt_after
):
    words = ["train", tiny_shards_dir, "--recipe", "eagle3-tiny", "--out", tmp_path / "run"]
    interrupt_after(3)
    code, _, err = main_here(capsys, *words)
    assert code == 130
    assert f"{tmp_path / 'run'}: saved at step 3; the same command again goes on" in err
    assert (tmp_path / "run" / "last").resolve().name == "step-000003"
    interrupt_after(-1)
    code, _, err = main_here(capsys, *words)
    assert code == 0
    assert "going on from step 3" in err


def test_a_dry_run_learns_a_row_by_heart_and_writes_nothing(tmp_path, tiny_shards_dir, capsys):
    words = ["train", tiny_shards_dir, "--recipe", "eagle3-tiny", "--out", tmp_path / "run", "--dry-run"]
    code, out, err = main_here(capsys, *words, "--set", "run.seed=5")
    assert code == 0
    made, following = out.splitlines()
    before, after, longest = map(float, re.findall(r"(\d\.\d\d)", made.split("acceptance length")[1]))
    assert before < after <= longest
    assert after >= 1 + 0.95 * (longest - 1)
    assert following == (
        f"next: eagle train {tiny_shards_dir} --recipe eagle3-tiny --out {tmp_path / 'run'} --set run.seed=5"
    )
    assert "step 10: loss" in err
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("environment", "processes", "words"),
    [
        ({}, None, "eagle train 'my shards' --set run.seed=5 --set 'head.layer_ids=[1, 2]'"),
        ({}, 1, "eagle train 'my shards' --set run.seed=5 --set 'head.layer_ids=[1, 2]' --processes 1"),
        (
            {"RANK": "0", "WORLD_SIZE": "2", "EAGLE_RELAUNCHED": "2"},
            None,
            "eagle train 'my shards' --set run.seed=5 --set 'head.layer_ids=[1, 2]' --processes 2",
        ),
        ({"RANK": "0", "WORLD_SIZE": "2"}, None, "the same launch without --dry-run"),
    ],
)
def test_a_dry_run_names_the_whole_command_that_follows(environment, processes, words, monkeypatch):
    from eagle_cli.train import _following

    for name in ("RANK", "WORLD_SIZE", "EAGLE_RELAUNCHED"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    given = ["train", "my shards", "--set", "run.seed=5", "--set", "head.layer_ids=[1, 2]"]
    assert _following(given, processes) == words


def test_a_dry_run_that_does_not_learn_says_so(tmp_path, tiny_shards_dir, capsys, monkeypatch):
    monkeypatch.setattr(dry_run, "LEARNING_RATE", 1e-30)
    monkeypatch.setattr(dry_run, "MOST_STEPS", 3)
    words = ["train", tiny_shards_dir, "--recipe", "eagle3-tiny", "--out", tmp_path / "run", "--dry-run"]
    code, out, _ = main_here(capsys, *words, "--json")
    found = json.loads(out)
    assert (code, found["learned"], found["steps"]) == (1, False, 3)
    assert found["loss"][0] == found["loss"][1]


@pytest.mark.slow
def test_wandb_offline_needs_no_key(tmp_path, tiny_shards_dir):
    pytest.importorskip("wandb")
    words = [
        "train",
        tiny_shards_dir,
        "--recipe",
        "eagle3-tiny",
        "--out",
        tmp_path / "run",
        "--track",
        "wandb",
    ]
    done = eagle(*words, HOME=str(tmp_path), WANDB_API_KEY="")
    assert done.returncode == 0, done.stderr
    assert "no key found, logging offline" in done.stderr
    assert list((tmp_path / "run" / "wandb").glob("offline-run-*"))
    assert len(read_metrics(tmp_path / "run")) == 9
