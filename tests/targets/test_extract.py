"""Extraction: by value at every position, the same bytes however it is run, nothing wrong accepted."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from eagle_train.errors import UserError
from eagle_train.shards import upkeep
from eagle_train.shards.reader import open_shards
from eagle_train.targets import extract as room
from eagle_train.targets import survey as survey_room
from eagle_train.targets.extract import extract
from eagle_train.targets.load import load_target

Run = Callable[..., dict[str, Any]]


@pytest.fixture
def run(tiny_rows_dir: Path, tiny_target_dir: Path, tmp_path: Path) -> Run:
    """Extract the tiny rows into ``tmp_path / out`` in many small shards."""

    def call(
        out: str = "out", rows: Path = tiny_rows_dir, target: Path = tiny_target_dir, **more: Any
    ) -> Any:
        settings = {"batch_tokens": 256, "shard_tokens": 512, "dtype": "fp32", "device": "cpu", **more}
        return extract(rows, target, tmp_path / out, show=False, **settings)

    return call


def _bytes(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in sorted(folder.iterdir())}


@pytest.mark.parametrize("codec", ["fp32", "bf16", "fp8", "int8"])
def test_every_value_is_the_models_own(run: Run, tmp_path: Path, tiny_target_dir: Path, codec: str) -> None:
    run(features="all", codec=codec)
    shards = open_shards(tmp_path / "out")
    model = load_target(tiny_target_dir, device="cpu").model
    for i in range(shards.num_rows):
        row = shards.read(i)
        with torch.no_grad():  # alone, without padding
            own = model(input_ids=row.input_ids[None], output_hidden_states=True)
        aux = torch.cat([own.hidden_states[k][0] for k in (2, 4, 5)], dim=-1)
        assert row.aux is not None
        assert row.last_all is not None
        for stored, want, layers in ((row.aux, aux, 3), (row.last_all, own.hidden_states[-1][0], 1)):
            assert stored.dtype == (torch.bfloat16 if codec == "bf16" else torch.float32)
            largest = want.abs().unflatten(1, (layers, -1)).amax(-1, keepdim=True).expand(-1, -1, 32)
            absolute = {"fp8": largest * 2**-18, "int8": largest / 250}.get(codec, 0 * largest)
            relative = {"bf16": 2**-8, "fp8": 2**-4}.get(codec, 0.0)
            most = 1e-4 + 1e-4 * want.abs() + relative * want.abs() + absolute.flatten(1)
            assert bool(((stored.float() - want).abs() <= most).all())
        positions = [t for s, e in row.spans for t in range(s - 1, e)]
        logits = own.logits[0, positions]
        torch.testing.assert_close(row.label_lse, logits.logsumexp(-1), rtol=1e-5, atol=1e-5)
        assert torch.equal(row.label_argmax, logits.argmax(-1))


def test_states_encoded_piece_by_piece_are_the_same(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from eagle_train.shards import writer

    run("at-once", codec="fp8", features="all")
    monkeypatch.setattr(writer, "_PIECE", 7)
    run("in-pieces", codec="fp8", features="all")
    assert _bytes(tmp_path / "in-pieces") == _bytes(tmp_path / "at-once")


def test_the_first_and_last_label_positions_of_each_answer(
    run: Run, tmp_path: Path, tiny_target_dir: Path
) -> None:
    run(codec="fp32")
    shards = open_shards(tmp_path / "out")
    target = load_target(tiny_target_dir, device="cpu")
    row = next(shards.read(i) for i in range(shards.num_rows) if len(shards.spans[i]) == 2)
    with torch.no_grad():
        own = target.model(input_ids=row.input_ids[None], output_hidden_states=True)
    (s0, e0), (s1, e1) = row.spans
    assert row.input_ids[e0] == row.input_ids[e1] == target.eos_ids[0]  # the end-of-turn token is supervised
    first_of_second = e0 - s0 + 1
    for label, position in ((0, s0 - 1), (e0 - s0, e0 - 1), (first_of_second, s1 - 1), (-1, e1 - 1)):
        torch.testing.assert_close(
            row.label_last[label], own.hidden_states[-1][0, position], rtol=1e-4, atol=1e-4
        )
        assert row.label_argmax[label] == own.logits[0, position].argmax()


def test_other_layers_are_stored_when_asked_for(run: Run, tmp_path: Path, tiny_target_dir: Path) -> None:
    run(codec="fp32", layer_ids=(0, 7))
    shards = open_shards(tmp_path / "out")
    assert shards.info["layer_ids"] == [0, 7]
    row = shards.read(0)
    with torch.no_grad():
        own = load_target(tiny_target_dir, device="cpu").model(
            input_ids=row.input_ids[None], output_hidden_states=True
        )
    want = torch.cat([own.hidden_states[k][0] for k in (0, 7)], dim=-1)
    torch.testing.assert_close(row.aux, want, rtol=1e-4, atol=1e-4)


def test_medusa_shards_hold_label_states_only(run: Run, tmp_path: Path) -> None:
    run(features="medusa", codec="fp32")
    row = open_shards(tmp_path / "out").read(0)
    assert row.aux is None
    assert row.last_all is None
    assert len(row.label_last) == len(row.label_argmax) > 0


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
    kept = {name: (tmp_path / "shared" / name).stat().st_mtime_ns for name in _shards(tmp_path / "shared")}
    assert 1 < len(kept) < 7
    monkeypatch.setenv("WORLD_SIZE", "3")
    for rank in ("2", "0", "1"):  # the first does all there is to do, the main one writes the manifest
        monkeypatch.setenv("RANK", rank)
        summary = run("shared")
        assert summary["shards_done_here"] == (7 - len(kept) if rank == "2" else 0)
    assert all((tmp_path / "shared" / name).stat().st_mtime_ns == time for name, time in kept.items())
    assert _bytes(tmp_path / "shared") == _bytes(tmp_path / "alone")


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
    assert sorted(seen) == _shards(tmp_path / "out")


def _shards(folder: Path) -> list[str]:
    return sorted(file.name for file in folder.glob("shard-*.safetensors"))


def test_a_missing_or_cut_shard_is_made_anew_with_the_same_bytes(run: Run, tmp_path: Path) -> None:
    run()
    before = _bytes(tmp_path / "out")
    (tmp_path / "out" / "shard-00001.safetensors").unlink()
    (tmp_path / "out" / "shard-00003.safetensors").write_bytes(before["shard-00003.safetensors"][:-7])
    for name in ("shard-00003.safetensors", "index.safetensors", "shards.json", "target.safetensors"):
        left = tmp_path / "out" / f".{name}.0123456789ab.tmp"
        left.mkdir()
        (left / name).write_bytes(b"left behind")
        (left / ".tmpAbCd12").write_bytes(b"by safetensors")
    assert run()["shards_done_here"] == 2
    assert _bytes(tmp_path / "out") == before


def test_a_flipped_bit_is_found_and_the_shard_made_anew(run: Run, tmp_path: Path) -> None:
    run()
    before = _bytes(tmp_path / "out")
    content = bytearray(before["shard-00004.safetensors"])
    content[-9] ^= 1
    (tmp_path / "out" / "shard-00004.safetensors").write_bytes(content)
    assert run()["shards_done_here"] == 1
    assert _bytes(tmp_path / "out") == before


@pytest.mark.parametrize("name", ["target.safetensors", "target.json", "shards.json", "index.safetensors"])
@pytest.mark.parametrize("damage", ["missing", "cut"])
def test_a_damaged_record_is_written_anew(run: Run, tmp_path: Path, name: str, damage: str) -> None:
    run()
    before = _bytes(tmp_path / "out")
    (tmp_path / "out" / name).unlink()
    if damage == "cut":
        (tmp_path / "out" / name).write_bytes(before[name][:40])
    assert run()["shards_done_here"] == 0
    assert _bytes(tmp_path / "out") == before


def test_a_shard_of_another_extraction_is_made_anew(
    run: Run, tmp_path: Path, tiny_shards_eagle1_dir: Path
) -> None:
    run()
    before = _bytes(tmp_path / "out")
    shutil.copy(tiny_shards_eagle1_dir / "shard-00002.safetensors", tmp_path / "out")
    assert run()["shards_done_here"] == 1
    assert _bytes(tmp_path / "out") == before


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
    before = _bytes(tmp_path / "out")
    (tmp_path / "out" / "shard-00006.safetensors").unlink()  # as it was when the late one looked
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "1")
    assert run()["shards_done_here"] == 1
    assert _bytes(tmp_path / "out") == before


def test_a_shard_that_another_worker_removes_at_the_last_moment_is_made_anew(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run()
    before, own, calls = _bytes(tmp_path / "out"), room.close_directory, []

    def removed_meanwhile(folder: Path, plan: Any) -> Any:
        calls.append(1)
        if len(calls) == 1:
            (folder / "shard-00003.safetensors").unlink()
        return own(folder, plan)

    monkeypatch.setattr(room, "close_directory", removed_meanwhile)
    assert run()["shards_done_here"] == 1
    assert len(calls) == 2
    assert _bytes(tmp_path / "out") == before


def test_damage_in_anothers_share_is_left_to_it(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run()
    before = _bytes(tmp_path / "out")
    content = bytearray(before["shard-00001.safetensors"])
    content[-9] ^= 1
    (tmp_path / "out" / "shard-00001.safetensors").write_bytes(content)
    monkeypatch.setenv("WORLD_SIZE", "2")
    for rank, made in (("0", 0), ("1", 1)):
        monkeypatch.setenv("RANK", rank)
        assert run()["shards_done_here"] == made
    assert _bytes(tmp_path / "out") == before


def test_finished_work_is_not_done_again(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    run()
    monkeypatch.setattr(room, "run_batch", None)
    assert run()["shards_done_here"] == 0


def test_settings_left_out_are_those_of_the_plan_that_is_there(run: Run, tmp_path: Path) -> None:
    run(batch_tokens=128, shard_tokens=300)
    before = _bytes(tmp_path / "out")
    (tmp_path / "out" / "shard-00000.safetensors").unlink()
    run(batch_tokens=None, shard_tokens=None)
    assert _bytes(tmp_path / "out") == before


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


def test_rows_prepared_for_another_tokenizer_are_refused(
    run: Run, tmp_path: Path, tiny_rows_dir: Path
) -> None:
    rows = Path(shutil.copytree(tiny_rows_dir, tmp_path / "rows"))
    info = json.loads((rows / "rows.json").read_text())
    (rows / "rows.json").write_text(json.dumps({**info, "tokenizer_fingerprint": "0123456789abcdef"}))
    with pytest.raises(
        UserError, match=r"\(tokenizer 0123456789abcdef\).*has tokenizer \w+\. Run eagle prepare"
    ):
        run(rows=rows)


def test_a_shallow_target_needs_its_layers_named(
    run: Run, tmp_path: Path, make_tiny_target: Callable[..., Path]
) -> None:
    shallow = make_tiny_target(tmp_path / "shallow", num_layers=4)
    with pytest.raises(UserError, match=r"4 layers.*--layers"):
        run(target=shallow)
    assert run(target=shallow, layer_ids=(0, 1, 3))["layer_ids"] == [0, 1, 3]


def test_a_disk_without_room_is_refused_before_any_work(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = shutil.disk_usage(tmp_path)
    for free, advice in (
        (900_000, "; use --codec bf16"),
        (600_000, "; use --codec fp8"),
        (99_000, "; choose"),
    ):
        monkeypatch.setattr(survey_room.shutil, "disk_usage", lambda path, n=free: disk._replace(free=n))
        with pytest.raises(
            UserError, match=rf"1\.5 MiB to write, .* free on this disk{advice}.*--ignore-disk"
        ):
            run(codec="fp32")
        assert not (tmp_path / "out").exists()
    assert run(ignore_disk=True)["complete"]
    assert run()["complete"]  # nothing left to write


def test_a_disk_that_fills_up_leaves_whole_shards_and_no_scraps(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import safetensors.torch
    from safetensors import SafetensorError

    own, calls = safetensors.torch.save_file, []

    def fills(tensors: Any, name: str, metadata: Any = None) -> None:
        own(tensors, name, metadata=metadata)
        calls.append(name)
        if len(calls) == 4:  # the target, then the third shard
            raise SafetensorError("I/O error: No space left on device (os error 28)")

    monkeypatch.setattr(safetensors.torch, "save_file", fills)
    with pytest.raises(
        UserError, match=r"shard-00002\.safetensors: No space left on device .*same command again"
    ):
        run()
    assert _shards(tmp_path / "out") == ["shard-00000.safetensors", "shard-00001.safetensors"]
    assert not list((tmp_path / "out").glob(".*"))
    assert run()["complete"]


def _poison(monkeypatch: pytest.MonkeyPatch, is_bad: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Make features NaN from the first token on in each row of the batch for which `is_bad` says so."""
    from eagle_train.targets.load import Target

    own = Target.run_body

    def run_body(self: Target, input_ids: torch.Tensor, **arguments: Any) -> torch.Tensor:
        last = own(self, input_ids, **arguments)
        return last.masked_fill(is_bad(input_ids)[:, None, None], float("nan"))

    monkeypatch.setattr(Target, "run_body", run_body)


def test_a_single_bad_row_is_skipped_and_counted(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run("clean", codec="fp32")
    clean = open_shards(tmp_path / "clean")
    bad = clean.read(11).input_ids
    _poison(monkeypatch, lambda ids: torch.tensor([torch.equal(row[: len(bad)], bad) for row in ids]))
    assert run("out", codec="fp32")["skipped"] == 1
    shards = open_shards(tmp_path / "out")
    assert shards.info["skipped"] == [
        {"row": 11, "row_id": clean.row_ids[11], "reason": "features not finite"}
    ]
    assert shards.row_ids == clean.row_ids[:11] + clean.row_ids[12:]
    for i, row_id in enumerate(shards.row_ids):
        mine, want = shards.read(i), clean.read(clean.row_ids.index(row_id))
        for name in ("input_ids", "aux", "label_last", "label_argmax", "label_lse"):
            assert torch.equal(getattr(mine, name), getattr(want, name)), name
    assert upkeep.verify(tmp_path / "out", show=False)["faults"] == []


def test_too_many_bad_rows_stop_the_run_and_are_not_written_as_finished(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run("clean")
    lengths = open_shards(tmp_path / "clean").lengths
    _poison(monkeypatch, lambda ids: torch.tensor([int(row.bool().sum()) % 3 == 0 for row in ids]))
    assert 2 < sum(n % 3 == 0 for n in lengths) < len(lengths)
    with pytest.raises(UserError, match=r"row \w{16}-0: features are NaN or infinite.*--max-bad-rows"):
        run("out")
    with pytest.raises(UserError, match="features are NaN or infinite"):
        run("out")  # the same again stops again
    assert run("out", max_bad_rows=20)["skipped"] == sum(n % 3 == 0 for n in lengths)


def test_a_target_that_gives_only_nan_stops_at_once_with_a_row_named(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _poison(monkeypatch, lambda ids: torch.ones(len(ids), dtype=torch.bool))
    with pytest.raises(UserError, match=r"row \w{16}-0: all features of the first batch are NaN"):
        run()
    assert not _shards(tmp_path / "out")


def test_a_batch_that_memory_does_not_hold_is_one_line(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def too_much(*arguments: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 9 GiB")

    monkeypatch.setattr(room, "run_batch", too_much)
    with pytest.raises(
        UserError, match=r"out of memory at a batch of \d+ tokens .* --batch-tokens below 256"
    ):
        run()


def test_a_token_outside_the_vocabulary_is_named(
    run: Run, tmp_path: Path, make_tiny_target: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    from eagle_train.targets.load import Target

    monkeypatch.setattr(Target, "vocab_size", 40)
    with pytest.raises(UserError, match=r"row \w{16}-0: token \d+ outside the target's vocabulary of 40"):
        run()


def test_no_shard_holds_padding(run: Run, tmp_path: Path, tiny_rows_dir: Path) -> None:
    summary = run()
    info = json.loads((tiny_rows_dir / "rows.json").read_text())
    assert summary["tokens"] == info["tokens"]
    assert summary["labels"] == info["supervised_tokens"]
    assert summary["rows"] == info["rows"]


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (
            {"features": "eagel3"},
            "--for eagel3: wanted one of eagle3, eagle1, medusa, all; did you mean 'eagle3'",
        ),
        ({"codec": "bf61"}, "--codec bf61: wanted one of bf16, fp32, fp8, int8; did you mean 'bf16'"),
        ({"layer_ids": (5, 2)}, "wanted ascending distinct numbers"),
        ({"layer_ids": ()}, "needs layers"),
        ({"features": "eagle1", "layer_ids": (2,)}, "stores no layers"),
        ({"batch_tokens": -1}, "wanted 1 or more"),
        ({"device": "cqu"}, "--device cqu"),
    ],
)
def test_impossible_settings_are_refused(
    run: Run, tmp_path: Path, settings: dict[str, Any], words: str
) -> None:
    with pytest.raises(UserError, match=words):
        run(**settings)
    assert not (tmp_path / "out").exists()
