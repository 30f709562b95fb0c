"""An extraction that goes on: other workers, damaged shards, settings and targets that changed."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from eagle_train.errors import UserError
from eagle_train.shards.reader import open_shards
from eagle_train.targets import extract as room

from .small import Run, bytes_of, flip_a_bit, shards_in


def _stop_at_batch(monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    own, calls = room.run_batch, []

    def stops(*arguments: Any) -> Any:
        calls.append(1)
        if len(calls) == number:
            raise KeyboardInterrupt
        return own(*arguments)

    monkeypatch.setattr(room, "run_batch", stops)


def test_another_number_of_workers_goes_on_where_the_first_stopped(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run("alone")
    with monkeypatch.context() as stopped, pytest.raises(KeyboardInterrupt):
        _stop_at_batch(stopped, 9)
        run("shared")
    assert not (tmp_path / "shared" / "shards.json").exists()
    kept = {name: (tmp_path / "shared" / name).stat().st_mtime_ns for name in shards_in(tmp_path / "shared")}
    assert 1 < len(kept) < 7
    monkeypatch.setenv("WORLD_SIZE", "3")
    for rank in ("2", "0", "1"):  # the first does all there is to do, the main one writes the manifest
        monkeypatch.setenv("RANK", rank)
        summary = run("shared")
        assert summary["shards_done_here"] == (7 - len(kept) if rank == "2" else 0)
    assert all((tmp_path / "shared" / name).stat().st_mtime_ns == time for name, time in kept.items())
    assert bytes_of(tmp_path / "shared") == bytes_of(tmp_path / "alone")


def test_each_worker_verifies_its_share_of_what_is_there(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from eagle_train.shards.files import ShardFile

    run()
    own, seen = ShardFile.verify, []

    def verify(self: ShardFile) -> None:
        seen.append(self.path.name)
        own(self)

    monkeypatch.setattr(ShardFile, "verify", verify)
    monkeypatch.setenv("WORLD_SIZE", "3")
    for rank in range(3):
        monkeypatch.setenv("RANK", str(rank))
        run()
    assert sorted(seen) == shards_in(tmp_path / "out")


def test_a_missing_or_cut_shard_is_made_anew_with_the_same_bytes(
    run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run()
    before = bytes_of(tmp_path / "out")
    (tmp_path / "out" / "shard-00001.safetensors").unlink()
    (tmp_path / "out" / "shard-00003.safetensors").write_bytes(before["shard-00003.safetensors"][:-7])
    for name in ("shard-00003.safetensors", "index.safetensors", "shards.json", "target.safetensors"):
        left = tmp_path / "out" / f".{name}.0123456789ab.tmp"
        left.mkdir()
        (left / name).write_bytes(b"left behind")
        (left / ".tmpAbCd12").write_bytes(b"by safetensors")
    assert run()["shards_done_here"] == 2
    assert bytes_of(tmp_path / "out") == before
    size, shard = len(before["shard-00003.safetensors"]), f"extract: {tmp_path}/out/shard-0000"
    assert capsys.readouterr().err.splitlines() == [
        f"{shard}1.safetensors: missing: made anew",
        f"{shard}3.safetensors: {size - 7:,} bytes, its header says {size:,}: cut off or damaged: made anew",
    ]


def test_a_flipped_bit_is_found_and_the_shard_made_anew(
    run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run()
    before = bytes_of(tmp_path / "out")
    flip_a_bit(tmp_path / "out" / "shard-00004.safetensors")
    assert run()["shards_done_here"] == 1
    assert bytes_of(tmp_path / "out") == before
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"extract: {tmp_path}/out/shard-00004.safetensors: tensor ")
    assert line.endswith(" is damaged (checksum differs): made anew")
    assert run()["shards_done_here"] == 0
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("name", ["target.safetensors", "target.json", "shards.json", "index.safetensors"])
@pytest.mark.parametrize("damage", ["missing", "cut"])
def test_a_damaged_record_is_written_anew(run: Run, tmp_path: Path, name: str, damage: str) -> None:
    run()
    before = bytes_of(tmp_path / "out")
    (tmp_path / "out" / name).unlink()
    if damage == "cut":
        (tmp_path / "out" / name).write_bytes(before[name][:40])
    assert run()["shards_done_here"] == 0
    assert bytes_of(tmp_path / "out") == before


def test_a_shard_of_another_extraction_is_made_anew(
    run: Run, tmp_path: Path, tiny_shards_eagle1_dir: Path
) -> None:
    run()
    before = bytes_of(tmp_path / "out")
    shutil.copy(tiny_shards_eagle1_dir / "shard-00002.safetensors", tmp_path / "out")
    assert run()["shards_done_here"] == 1
    assert bytes_of(tmp_path / "out") == before


def test_a_manifest_that_no_longer_holds_is_taken_away_at_once(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run()
    (tmp_path / "out" / "shard-00001.safetensors").unlink()
    _stop_at_batch(monkeypatch, 1)
    with pytest.raises(KeyboardInterrupt):
        run()
    with pytest.raises(UserError, match="extraction is not finished"):
        open_shards(tmp_path / "out")


def test_a_late_worker_does_not_take_away_the_manifest_that_the_main_one_wrote(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run()
    before = bytes_of(tmp_path / "out")
    (tmp_path / "out" / "shard-00006.safetensors").unlink()  # as it was when the late one looked
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "1")
    assert run()["shards_done_here"] == 1
    assert bytes_of(tmp_path / "out") == before


def test_a_shard_that_another_worker_removes_at_the_last_moment_is_made_anew(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run()
    before, own, calls = bytes_of(tmp_path / "out"), room.close_directory, []

    def removed_meanwhile(folder: Path, plan: Any) -> Any:
        calls.append(1)
        if len(calls) == 1:
            (folder / "shard-00003.safetensors").unlink()
        return own(folder, plan)

    monkeypatch.setattr(room, "close_directory", removed_meanwhile)
    assert run()["shards_done_here"] == 1
    assert len(calls) == 2
    assert bytes_of(tmp_path / "out") == before


def test_damage_in_anothers_share_is_left_to_it(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run()
    before = bytes_of(tmp_path / "out")
    flip_a_bit(tmp_path / "out" / "shard-00001.safetensors")
    monkeypatch.setenv("WORLD_SIZE", "2")
    for rank, made in (("0", 0), ("1", 1)):
        monkeypatch.setenv("RANK", rank)
        assert run()["shards_done_here"] == made
    assert bytes_of(tmp_path / "out") == before


def test_finished_work_is_not_done_again(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    run()
    monkeypatch.setattr(room, "run_batch", None)
    assert run()["shards_done_here"] == 0


def test_settings_left_out_are_those_of_the_plan_that_is_there(run: Run, tmp_path: Path) -> None:
    run(batch_tokens=128, shard_tokens=300)
    before = bytes_of(tmp_path / "out")
    (tmp_path / "out" / "shard-00000.safetensors").unlink()
    run(batch_tokens=None, shard_tokens=None)
    assert bytes_of(tmp_path / "out") == before


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"codec": "fp32"}, "codec bf16; this run has fp32"),
        ({"layer_ids": (1, 2, 3)}, r"layers \(2, 4, 5\); this run has \(1, 2, 3\)"),
        ({"features": "eagle1"}, "--for eagle3; this run has eagle1"),
        ({"dtype": "bf16"}, "dtype fp32; this run has bf16"),
        ({"batch_tokens": 300}, "batch tokens 256; this run has 300"),
        ({"threads": 2}, "threads 1; this run has 2"),
    ],
)
def test_going_on_with_another_setting_is_refused(run: Run, change: dict[str, Any], words: str) -> None:
    run()
    with pytest.raises(UserError, match=words):
        run(**change)


def test_another_setting_is_refused_before_the_weights_are_loaded(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    run()
    monkeypatch.setattr(room, "load_target", None)
    with pytest.raises(UserError, match="codec bf16; this run has fp32"):
        run(codec="fp32")


def test_going_on_with_another_target_or_rows_is_refused(
    run: Run, tmp_path: Path, make_tiny_target: Callable[..., Path], tiny_target_dir: Path
) -> None:
    run()
    other = make_tiny_target(tmp_path / "other", seed=1)
    with pytest.raises(UserError, match=rf"target {tiny_target_dir} \(\w+\); this run has {other} \(\w+\)"):
        run(target=other)
    moved = Path(shutil.copytree(tiny_target_dir, tmp_path / "moved"))
    assert run(target=moved)["complete"]  # the same weights elsewhere are the same target


def test_other_rows_are_refused(
    run: Run, tmp_path: Path, tiny_target_dir: Path, tiny_conversations: Path
) -> None:
    from eagle_train.data.prepare import prepare

    run()
    lines = tiny_conversations.read_text().splitlines()
    (tmp_path / "fewer.jsonl").write_text("\n".join(lines[:-1]) + "\n")
    prepare([str(tmp_path / "fewer.jsonl")], str(tiny_target_dir), tmp_path / "rows", show=False)
    with pytest.raises(UserError, match=r"rows \w{16}; this run has \w{16}"):
        run(rows=tmp_path / "rows")
