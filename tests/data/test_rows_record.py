"""A rows.json that was changed is named by its field, by whatever opens the rows."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from eagle_cli.main import main
from eagle_train.data.rows import open_rows
from eagle_train.errors import UserError


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("target", 7, "got 7, wanted a text"),
        ("counts", [], "got [], wanted an object"),
        ("counts.read", -1, "got -1, wanted a whole number of 0 or more"),
        ("counts.skipped", {"x": "y"}, "got {'x': 'y'}, wanted an object of counts"),
        ("bad_records", 3, "got 3, wanted a list of objects of place and damage"),
        ("bad_records", [{"place": "a"}], "got [{'place': 'a'}], wanted a list of objects of place and"),
        ("skipped_examples", {"x": [3]}, "got {'x': [3]}, wanted an object of lists of text"),
        ("end_of_turn", {"id": "2", "text": "x"}, "got {'id': '2', 'text': 'x'}, wanted null, or an object"),
        ("max_length", None, "got None, wanted a whole number of 2 or more"),
        ("max_length", -5, "got -5, wanted a whole number of 2 or more"),
        ("max_length", 3, "got 3, its longest row has "),
        ("tokens", 1, "got 1, its rows have "),
        ("supervised_tokens", None, "got None, wanted a whole number of 0 or more"),
        ("supervised_tokens", 1, "got 1, its rows have "),
        ("rows_digest", "f" * 64, f"got {'f' * 64}, its rows have "),
        ("rows_digest", "x", "got 'x', wanted 64 hex digits"),
        ("supervised_frequencies", {"5": 1}, "got 1 tokens in all, its rows have "),
        ("supervised_frequencies", {"x": 1}, "got {'x': 1}, wanted an object of counts by token id"),
    ],
)
def test_a_changed_field_is_refused_by_its_name(
    tiny_rows_dir: Path, tmp_path: Path, field: str, value: Any, words: str
) -> None:
    folder = Path(shutil.copytree(tiny_rows_dir, tmp_path / "rows"))
    info = json.loads((folder / "rows.json").read_text())
    section, _, key = field.rpartition(".")
    (info[section] if section else info)[key] = value
    (folder / "rows.json").write_text(json.dumps(info))
    with pytest.raises(UserError) as caught:
        open_rows(folder)
    assert str(caught.value).startswith(f"{folder}/rows.json: {field}: {words}")
    assert str(caught.value).endswith("; run eagle prepare again with --overwrite")


@pytest.mark.parametrize("command", ["inspect {rows}", "extract {rows} --target {target} --out {out}"])
def test_commands_refuse_a_rows_file_without_its_digest(
    tiny_rows_dir: Path,
    tiny_target_dir: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    command: str,
) -> None:
    folder = Path(shutil.copytree(tiny_rows_dir, tmp_path / "rows"))
    info = json.loads((folder / "rows.json").read_text())
    del info["rows_digest"]
    (folder / "rows.json").write_text(json.dumps(info))
    given = command.format(rows=folder, target=tiny_target_dir, out=tmp_path / "out").split()
    with pytest.raises(SystemExit, match="2"):
        main(given)
    error = capsys.readouterr().err
    assert error.startswith(f"error: {folder}/rows.json: rows_digest is missing, wanted 64 hex digits; ")
    assert not (tmp_path / "out").exists()
