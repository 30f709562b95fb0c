"""Pruning: nothing outside the folder, nothing lost by a kill, refusals before anything is touched."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from eagle_cli.main import main
from eagle_train.errors import UserError
from eagle_train.recipe_files import load_recipe
from eagle_train.shards import manifest, pruning, upkeep
from eagle_train.shards.files import open_shard
from eagle_train.shards.pruning import prune
from eagle_train.shards.reader import open_shards
from eagle_train.shards.schema import shard_name
from eagle_train.targets.extract import extract
from eagle_train.training.loop import train
from eagle_train.training.run_folder import fingerprint

from .conftest import bytes_of, edit, flip


@pytest.fixture
def half(tmp_path: Path, tiny_shards_dir: Path) -> Path:
    """One of two parts of the shards: no extraction goes on in it."""
    upkeep.split(tiny_shards_dir, tmp_path / "parts", 2, show=False)
    return Path(shutil.copytree(tmp_path / "parts" / "part-0", tmp_path / "half"))  # no links


def _faults(folder: Path) -> list[str]:
    return list(upkeep.verify(folder, show=False)["faults"])


def test_no_file_outside_the_folder_is_removed(copied: Path, tmp_path: Path) -> None:
    (tmp_path / "precious").write_text("x")
    edit(copied / "shards.json", lambda info: info["shards"][0].update(file="../precious"))
    for work in (
        lambda: prune(copied, damaged=True, show=False),
        lambda: upkeep.describe(copied),
        lambda: upkeep.split(copied, tmp_path / "out", 2, show=False),
        lambda: upkeep.merge([copied, copied], tmp_path / "out", show=False),
        lambda: open_shards(copied),
    ):
        with pytest.raises(UserError, match=r"shards\[0\]\.file: got .*precious"):
            work()
    assert any("precious" in fault for fault in _faults(copied))
    assert (tmp_path / "precious").read_text() == "x"


def test_damage_that_would_stay_is_refused_before_anything_is_touched(half: Path) -> None:
    flip(half / "shard-00001.safetensors")
    before = bytes_of(half)
    with pytest.raises(UserError, match=r"shard-00001\.safetensors: .*it would stay: give --damaged too"):
        prune(half, shards=[0], show=False)
    assert bytes_of(half) == before
    assert "eagle shards prune" in upkeep.verify(half, show=False)["advice"]
    assert "extract again" not in " ".join(_faults(half))
    prune(half, damaged=True, show=False)
    assert _faults(half) == []
    assert open_shards(half).num_rows > 0


def test_a_merged_folder_is_not_emptied(half: Path) -> None:
    before = bytes_of(half)
    numbers = range(len(open_shards(half).info["shards"]))
    with pytest.raises(UserError, match="no whole shard would be left, and eagle shards merge or split"):
        prune(half, shards=numbers, show=False)
    assert bytes_of(half) == before


class _Killed(BaseException):
    pass


@pytest.mark.parametrize("step", [0, 1, 2, 3])
def test_a_killed_prune_goes_on(half: Path, step: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Killed before and after the index, after the manifest, and after the first file."""
    reached = iter(range(9))

    def killing(work: Callable[..., Any]) -> Callable[..., Any]:
        def run(*given: Any, **named: Any) -> Any:
            if next(reached) == step:
                raise _Killed
            return work(*given, **named)

        return run

    rows = open_shards(half).num_rows
    with monkeypatch.context() as patch:
        patch.setattr(manifest, "save_tensors", killing(manifest.save_tensors))
        patch.setattr(manifest, "write_json", killing(manifest.write_json))
        patch.setattr(Path, "unlink", killing(Path.unlink))
        with pytest.raises(_Killed):
            prune(half, shards=[0, 1], show=False)
    if step == 1:
        with pytest.raises(UserError, match=r"index\.safetensors: not the file .* --damaged mends it"):
            open_shards(half)
        assert len(_faults(half)) == 1
    else:
        assert _faults(half) == []
        assert open_shards(half).num_rows <= rows
    again = [n for n in (0, 1) if (half / f"shard-{n:05d}.safetensors").exists()]
    prune(half, shards=again, show=False)
    assert _faults(half) == []
    assert not (half / "shard-00000.safetensors").exists()
    assert open_shards(half).num_rows < rows


def test_index_and_manifest_are_written_anew_from_whole_shards(half: Path) -> None:
    before = bytes_of(half)
    (half / "index.safetensors").write_bytes(b"x")
    edit(half / "shards.json", lambda info: info.update(hidden_size=64))
    assert len(_faults(half)) == 2
    assert prune(half, damaged=True, show=False)["removed"] == []
    after = bytes_of(half)
    assert json.loads(after.pop("shards.json")) == json.loads(before.pop("shards.json"))
    assert after == before


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"hidden_size": 64}, "hidden_size: got 64"),
        ({"layer_ids": [1, 4, 5]}, "layer_ids: got"),
        ({"plan": "0123456789abcdef"}, "plan: not what the shards hold"),
        ({"supervised_frequencies": {"5": 1}}, "supervised_frequencies: not what"),
        ({"tokens": 1}, "tokens: got 1"),
        ({"hidden_size": -1}, "hidden_size: got -1"),
        ({"target": {}}, r"lacks target\.name"),
    ],
)
def test_verify_finds_what_was_edited(
    copied: Path, change: dict[str, Any], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    edit(copied / "shards.json", lambda info: info.update(change))
    with pytest.raises(SystemExit) as caught:
        main(["shards", "verify", str(copied)])
    assert caught.value.code == 2
    said = capsys.readouterr()
    assert any(words.replace("\\", "") in line for line in said.out.splitlines())
    assert said.err.splitlines()[-1].endswith("1 fault; run the same eagle extract again")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"num_rows": 10**15}, "damaged or edited"),
        ({"setting": {}}, "damaged or edited"),
        ({"shards": []}, "damaged or edited"),
        (
            {"shards": [{"batches": [list(range(24))], "tokens": 1, "labels": 1, "bytes": 1}]},
            "not the plan of",
        ),
    ],
)
def test_an_edited_plan_is_a_fault(copied: Path, change: dict[str, Any], words: str) -> None:
    plan = json.loads((copied / "plan.json").read_text())
    (copied / "plan.json").write_text(json.dumps({**plan, **change}))
    (fault,) = _faults(copied)
    assert fault.startswith(f"{copied / 'plan.json'}: ")
    assert words in fault


def test_the_same_extraction_mends_a_lost_target_and_an_edited_manifest(
    copied: Path, tiny_rows_dir: Path, tiny_target_dir: Path
) -> None:
    before = bytes_of(copied)
    (copied / "target.safetensors").unlink()
    edit(copied / "shards.json", lambda info: info.update(target={}))
    assert all("run the same eagle extract again" in fault for fault in _faults(copied))
    settings: dict[str, Any] = {"codec": "fp32", "dtype": "fp32", "device": "cpu", "show": False}
    extract(tiny_rows_dir, tiny_target_dir, copied, **settings)
    assert bytes_of(copied) == before
    (copied / "target.safetensors").unlink()
    found = upkeep.verify(copied, show=False)
    assert len(found["faults"]) == 1
    assert found["faults"][0].endswith("target.safetensors: not found; run the same eagle extract again")
    assert found["advice"] == "run the same eagle extract again"


def test_copies_pruned_differently_are_other_data(copied: Path, tmp_path: Path) -> None:
    whole = fingerprint(open_shards(copied))
    names = [entry["file"] for entry in open_shards(copied).info["shards"]]
    texts = [whole]
    for number in range(len(names)):
        part = Path(shutil.copytree(copied, tmp_path / f"without-{number}"))
        prune(part, shards=[number], show=False)
        texts.append(fingerprint(open_shards(part)))
    assert len(set(texts)) == len(names) + 1
    assert whole == fingerprint(open_shards(shutil.copytree(copied, tmp_path / "same")))


def test_a_folder_that_cannot_be_written_is_one_line(copied: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = bytes_of(copied)
    with monkeypatch.context() as patch:
        patch.setattr(os, "access", lambda *given: False)
        with pytest.raises(UserError, match="copy: read-only; prune changes the folder"):
            prune(copied, shards=[0], show=False)
    assert bytes_of(copied) == before

    def refuse(*given: Any, **named: Any) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(pruning.Path, "unlink", refuse)
    with pytest.raises(UserError, match=r"shard-00000\.safetensors: Permission denied; prune cannot remove"):
        prune(copied, shards=[0], show=False)


def test_rows_that_were_removed_are_counted_and_said(copied: Path, tmp_path: Path, capsys) -> None:
    rows = len(open_shard(copied / shard_name(0)).header["row_ids"])
    assert upkeep.describe(copied)["removed"] == 0
    prune(copied, shards=[0], show=False)
    assert upkeep.verify(copied, show=False)["removed"] == rows
    with pytest.raises(SystemExit):
        main(["shards", "info", str(copied)])
    assert f", {rows} rows more removed by prune: " in capsys.readouterr().out
    train(copied, load_recipe("eagle3-tiny", ["run.steps=1"]), tmp_path / "run")
    assert f"{rows} rows of {copied} were removed by eagle shards prune" in capsys.readouterr().err
    (copied / "plan.json").write_text("{")
    assert upkeep.describe(copied)["removed"] == 0
