"""The wrong kind of folder or file, or two exchanged: one line says what it is, and nothing is made."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from eagle_cli.main import main
from eagle_train.heads.config import HeadConfig
from eagle_train.heads.disk import build_head, save_head


@pytest.fixture(scope="module")
def places(tiny_target_dir, tiny_rows_dir, tiny_shards_dir, tmp_path_factory) -> dict[str, Path]:
    """A target, rows, shards, a head, conversations, a text without any, and an empty folder."""
    folder = tmp_path_factory.mktemp("places")
    torch.manual_seed(0)
    config = json.loads((tiny_target_dir / "config.json").read_text())
    save_head(build_head(HeadConfig.for_target(config, "eagle3")), folder / "head")
    (folder / "chats.jsonl").write_text(
        '{"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]}\n'
    )
    (folder / "text.jsonl").write_text('{"text": "x"}\n')
    (folder / "empty").mkdir()
    names = {name: folder / name for name in ("head", "chats.jsonl", "text.jsonl", "empty", "new")}
    return {**names, "target": tiny_target_dir, "rows": tiny_rows_dir, "shards": tiny_shards_dir}


@pytest.mark.parametrize(
    ("command", "told"),
    [
        ("inspect {shards}", "{shards}: shards of eagle extract, wanted the rows of eagle prepare"),
        (
            "inspect {chats}",
            "{chats}: is a file, wanted a folder of rows; make it with: eagle prepare {chats}",
        ),
        (
            "extract {shards} --target {target} --out {new}",
            "{shards}: shards of eagle extract, wanted the rows",
        ),
        ("extract {target} --target {rows} --out {new}", "{target}/rows.json: not found"),
        ("extract {rows} --target {head} --out {new}", "{head}: a draft head, wanted the target: a hub id"),
        (
            "extract {rows} --target {target} --out {rows}",
            "{rows}: holds rows of eagle prepare; choose another",
        ),
        ("extract {rows} --target {target} --out {chats} --processes 2", "{chats}: File exists (a file of"),
        ("prepare {chats} --target {rows} --out {new}", "{rows}: rows of eagle prepare, wanted the target: "),
        (
            "prepare {text} --target {target} --out {new}",
            "no row is left of 1 conversation (no conversation in",
        ),
        (
            "train {rows} --recipe eagle3-tiny --out {new}",
            "{rows}/shards.json: not found; prepared rows; run eagle",
        ),
        ("eval {target} --target {head}", "{head}: a draft head, wanted the target: a hub id, a model's dir"),
        (
            "eval {target} --target {target}",
            "{target}: a whole model, wanted a draft head; the model itself goes to",
        ),
        (
            "eval {head} --target {target} --questions {empty}",
            "{empty}: is a folder, wanted a file of JSON lines",
        ),
        (
            "eval {head} --target {target} --questions {chats}",
            '{chats}, line 1: no turns; wanted MT-bench form, such as {{"question_id": 1, "turns": [',
        ),
        ("eval {head} --predict {rows}", "{rows}: rows of eagle prepare, wanted shards of eagle extract, or"),
        (
            "eval --target {target} --method draft-model=frist:3",
            "--method draft-model=frist:3: wanted a model, or first:N",
        ),
        ("export {target} --engine vllm --out {new}", "{target}: a whole model, wanted a draft head"),
        ("import {target} --out {new}", "{target}: a whole model, wanted a draft head"),
        (
            "regenerate {chats} --target {target} --out {new}.txt",
            "--out {new}.txt: wanted a file ending in .jsonl",
        ),
    ],
)
def test_what_was_given_is_named_in_one_line(command, told, places, capsys):
    named = {name.split(".")[0]: path for name, path in places.items()}
    before = {name: sorted(path.iterdir()) for name, path in named.items() if path.is_dir()}
    with pytest.raises(SystemExit) as left:
        main([word.format(**named) for word in command.split()])
    assert left.value.code == 2
    said = capsys.readouterr()
    (error,) = [line for line in said.err.splitlines() if line.startswith("error: ")]
    assert error.startswith("error: " + told.format(**named))
    assert said.out == ""
    assert {name: sorted(path.iterdir()) for name, path in named.items() if path.is_dir()} == before
