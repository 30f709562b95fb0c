"""Exit codes and the one line that explains them, through the real command."""

import subprocess
import sys

import pytest
import typer

from eagle_cli import options
from eagle_cli.main import app, main

INTERRUPTED = "interrupted; give the same command again"


def run_with(body: str) -> subprocess.CompletedProcess:
    """Run ``eagle export`` in a process of its own, its work replaced by `body`."""
    program = (
        "import os, signal, sys\n"
        "from eagle_cli import main\n"
        "from eagle_train.errors import UserError\n"
        "import eagle_train.export.export as room\n"
        f"def work(*args, **settings):\n    {body}\n"
        "room.export = work\n"
        "main.main(['export', 'run', '--engine', 'vllm', '--out', 'head'])\n"
    )
    return subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)


@pytest.mark.parametrize(
    ("body", "code", "line"),
    [
        ("raise UserError('run: no such folder; train one')", 2, "error: run: no such folder; train one"),
        ("os.kill(os.getpid(), signal.SIGINT)", 130, INTERRUPTED),
        ("os.kill(os.getpid(), signal.SIGTERM)", 130, INTERRUPTED),
    ],
)
def test_errors_and_interrupts_are_one_line_and_a_code(body, code, line):
    ran = run_with(body)
    assert ran.returncode == code
    assert ran.stderr.strip().splitlines()[-1] == line
    assert "Traceback" not in ran.stderr


@pytest.mark.parametrize(
    ("words", "work", "file", "before", "after"),
    [
        (
            ["extract", "rows", "--target", "T"],
            "eagle_train.targets.workers.start_workers",
            "out/shard-00000.safetensors",
            "no shard was finished yet",
            "finished shards are kept",
        ),
        (
            ["train", "shards", "--recipe", "eagle3"],
            "eagle_train.training.loop.train",
            "out/last",
            "no step was saved yet",
            "finished steps are kept",
        ),
        (
            ["train", "shards", "--recipe", "eagle3", "--dry-run"],
            "eagle_train.training.dry_run.dry_run",
            "out/last",
            "a dry run keeps nothing",
            "a dry run keeps nothing",
        ),
        (
            ["regenerate", "a.jsonl", "--target", "T", "--processes", "1", "--out", "a.jsonl"],
            "eagle_train.regenerate.regenerate.regenerate",
            "a.jsonl.work/part-00000.jsonl",
            "no answer was made yet",
            "finished answers are kept",
        ),
        (
            ["demo"],
            "eagle_train.demo.demo",
            "out/rows/rows.json",
            "no stage was finished yet",
            "finished stages are kept",
        ),
    ],
)
def test_what_is_kept_of_an_interrupted_command_is_said(
    words, work, file, before, after, tmp_path, monkeypatch, capsys
):
    def interrupted(*given, **settings):
        raise KeyboardInterrupt

    monkeypatch.setattr(work, interrupted)
    monkeypatch.chdir(tmp_path)
    for kept in (before, after):
        with pytest.raises(SystemExit) as left:
            main([*words, *(() if "--out" in words else ("--out", "out"))])
        assert left.value.code == 130
        assert capsys.readouterr().err == f"interrupted; {kept}, give the same command again\n"
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).write_text("{}")


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["nope"], "error: eagle: No such command 'nope'; see eagle --help"),
        (["prepare"], "error: eagle prepare: Missing argument 'DATA...'; see eagle prepare --help"),
        (["train", "x"], "error: eagle train: Missing option '--recipe'; see eagle train --help"),
    ],
)
def test_a_mistyped_command_is_one_line_and_2(arguments, line):
    command = [sys.executable, "-c", "from eagle_cli.main import main; main()", *arguments]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert ran.returncode == 2
    assert ran.stderr.strip() == line
    assert ran.stdout == ""


def test_nothing_asked_for_shows_the_help_without_an_error():
    command = [sys.executable, "-c", "from eagle_cli.main import main; main()"]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert ran.returncode == 2
    assert "Commands" in ran.stdout + ran.stderr
    assert "error" not in ran.stderr


@pytest.mark.parametrize(
    ("words", "leaving"),
    [
        (["train", "my shards", "--recipe", "eagle3", "--out", "run"], ()),
        (
            [
                *(
                    "train",
                    "shards",
                    "--recipe",
                    "r.yaml",
                    "--out",
                    "run",
                    "--set",
                    "a=1",
                    "--set",
                    "c=[1, 2]",
                ),
                *("--resume", "--init-from", "head", "--track", "wandb", "--json"),
            ],
            ("processes",),
        ),
        (["regenerate", "a", "b", "--target", "t", "--out", "o", "--temperature", "0.7", "--batch", "4"], ()),
        (["prepare", "a", "--target", "t", "--out", "o", "--max-length", "2048"], ()),  # a default typed
    ],
)
def test_a_command_is_typed_again_as_it_was(words, leaving):
    command = typer.main.get_command(app).commands[words[0]]  # type: ignore[attr-defined]
    more = ["--processes", "3"] if leaving else []
    context = command.make_context(words[0], [*more, *words[1:]])
    assert options.typed(context, leaving) == words


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            ["regenerate", "a", "--target", "t", "--out", "o", "--tries", "2"],
            "regenerate: without --server the target answers here, so --tries has no meaning; leave it out",
        ),
        (
            ["regenerate", "a", "--target", "t", "--out", "o", "--server", "http://x", "--dtype", "auto"],
            "regenerate: with --server a server answers, so --dtype has no meaning; leave it out",
        ),
        (
            ["shards", "verify", "a", "--damaged"],
            "shards: verify is asked for, so --damaged has no meaning; leave it out",
        ),
        (
            ["shards", "merge", "a", "b", "--out", "c", "--parts", "2"],
            "shards: merge is asked for, so --parts has no meaning; leave it out",
        ),
        (
            ["shards", "prune", "a", "--out", "b"],
            "shards: prune is asked for, so --out has no meaning; leave it out",
        ),
    ],
)
def test_an_option_that_would_not_be_read_is_refused(words, said, capsys):
    with pytest.raises(SystemExit) as left:
        main(words)
    assert left.value.code == 2
    assert capsys.readouterr().err == f"error: eagle {said}\n"
