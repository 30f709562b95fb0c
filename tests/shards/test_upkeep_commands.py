"""``eagle shards`` as typed: what it says and its exit codes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from eagle_cli.main import main

from .conftest import flip


def _run(*arguments: str | Path) -> int:
    with pytest.raises(SystemExit) as caught:
        main(["shards", *map(str, arguments)])
    return int(caught.value.code or 0)


def test_verify_names_every_fault_and_exits_with_2(copied: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert _run("verify", copied) == 0
    assert capsys.readouterr().out.splitlines()[-1] == f"{copied}: 0 faults"
    flip(copied / "shard-00003.safetensors")
    (copied / "shard-00001.safetensors").unlink()
    (copied / "target.json").write_text("{")
    assert _run("verify", copied, "--json") == 2
    said = capsys.readouterr()
    faults = json.loads(said.out)["faults"]
    assert [fault.split(":")[0].rsplit("/", 1)[-1] for fault in faults] == [
        "shard-00001.safetensors",
        "shard-00003.safetensors",
        "target.json",
    ]
    assert said.err.splitlines()[-1].startswith(f"error: {copied}: 3 faults; run the same eagle extract")


def test_info_says_what_is_there(copied: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert _run("info", copied, "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["rows"], found["codec"], found["layer_ids"], found["complete"]) == (
        24,
        "fp32",
        [2, 4, 5],
        True,
    )
    assert found["bytes"] == sum(file.stat().st_size for file in copied.glob("shard-*"))
    (copied / "shards.json").unlink()
    (copied / "shard-00001.safetensors").unlink()
    assert _run("info", copied) == 0
    assert f"unfinished, {found['shards'] - 1} there;" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (
            ["vrify", "x"],
            "shards vrify: wanted one of verify, info, merge, split, prune; did you mean 'verify'?",
        ),
        (["verify", "a", "b"], "shards verify: got 2 directories, wanted one"),
        (["merge", "a", "b"], "shards merge: give the new directory with --out"),
        (["prune", "a"], "shards prune: say what to remove with --shard, --row or --damaged"),
        (["info", "nowhere"], "nowhere: no such folder"),
        (["merge", "a", "--out", "b"], "merge: got 1 directory, wanted two or more"),
    ],
)
def test_a_wrong_command_is_one_line(
    arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert _run(*arguments) == 2
    assert words in capsys.readouterr().err.splitlines()[-1]
