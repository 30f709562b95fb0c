"""An export replaces only what costs nothing, and is there whole or not at all, whatever happens."""

from __future__ import annotations

import errno
import os
import subprocess
from pathlib import Path

import pytest

import eagle_train.export.export as export_module
from eagle_train.errors import UserError
from eagle_train.export.export import export
from eagle_train.heads.disk import load_head


def _only(folder: Path, *names: str) -> None:
    assert sorted(entry.name for entry in folder.iterdir()) == sorted(names)


def test_a_full_disk_leaves_the_earlier_export_as_it_was(head_dir, tmp_path, monkeypatch):
    out = tmp_path / "out"
    export(head_dir("eagle3"), out, engine="vllm")
    before = {entry: entry.read_bytes() for entry in out.rglob("*") if entry.is_file()}
    newer = head_dir("eagle3", seed=1, name="newer")

    def full(path, content):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(export_module, "write_text", full)
    with pytest.raises(UserError, match="the disk is full"):
        export(newer, out, engine="vllm")
    assert {entry: entry.read_bytes() for entry in out.rglob("*") if entry.is_file()} == before
    _only(tmp_path, "head", "newer", "out")
    monkeypatch.undo()
    export(newer, out, engine="vllm")
    assert (out / "model.safetensors").read_bytes() != before[out / "model.safetensors"]
    _only(tmp_path, "head", "newer", "out")


def test_a_rename_that_fails_puts_the_earlier_export_back(head_dir, tmp_path, monkeypatch):
    source, out = head_dir("eagle3"), tmp_path / "out"
    export(source, out, engine="vllm")
    real = os.replace

    def replace(old, new):
        if Path(old).name == "new" and Path(new) == out:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        real(old, new)

    monkeypatch.setattr(os, "replace", replace)
    with pytest.raises(UserError, match="Input/output error"):
        export(source, out, engine="sglang")
    assert load_head(out).config.kind == "eagle3"
    _only(tmp_path, "head", "out")


def test_ctrl_c_leaves_nothing_behind(head_dir, tmp_path, monkeypatch):
    def interrupt(*arguments):
        raise KeyboardInterrupt

    monkeypatch.setattr(export_module, "verify", interrupt)
    with pytest.raises(KeyboardInterrupt):
        export(head_dir("eagle3"), tmp_path / "out", engine="vllm")
    _only(tmp_path, "head")


def test_leftovers_of_killed_exports_go_with_the_next_that_succeeds(head_dir, tmp_path):
    gone = subprocess.Popen(["true"])
    gone.wait()
    mine, other, living = (f".{name}.tmp" for name in (f"out.{gone.pid}", f"out.v2.{gone.pid}", "out.1"))
    for name in (mine, other, living):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text("half")
    export(head_dir("eagle3"), tmp_path / "out", engine="vllm")
    _only(tmp_path, "head", "out", other, living)


def test_what_stands_at_out_is_replaced_only_if_nothing_is_lost(head_dir, tmp_path):
    source, out = head_dir("eagle3"), tmp_path / "out"
    out.mkdir()
    export(source, out, engine="vllm")  # an empty folder
    export(source, out, engine="sglang")  # an earlier export
    (out / "notes.txt").write_text("mine")
    with pytest.raises(UserError, match=r"also holds notes\.txt"):
        export(source, out, engine="vllm")
    export(source, out, engine="vllm", overwrite=True)
    assert not (out / "notes.txt").exists()

    other = tmp_path / "other"
    other.mkdir()
    (other / "thesis.tex").write_text("years of work")
    with pytest.raises(UserError, match="exists and is no earlier export; choose another --out"):
        export(source, other, engine="vllm")
    assert (other / "thesis.tex").read_text() == "years of work"
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="is a file"):
        export(source, tmp_path / "file", engine="vllm", overwrite=True)


def test_overwrite_never_removes_the_source_or_what_holds_it(head_dir, tmp_path, monkeypatch):
    source = head_dir("eagle3")
    for out in (source, tmp_path):
        with pytest.raises(UserError, match="must not replace"):
            export(source, out, engine="vllm", overwrite=True)
    work = tmp_path / "work" / "deep"
    work.mkdir(parents=True)
    monkeypatch.chdir(work)
    with pytest.raises(UserError, match="must not replace"):
        export(source, work.parent, engine="vllm", overwrite=True)
    assert (source / "model.safetensors").is_file()
