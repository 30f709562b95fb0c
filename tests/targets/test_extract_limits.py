"""What stops an extraction or makes it skip a row: disk, memory, values that are no numbers, wrong input."""

from __future__ import annotations

import json
import shutil
from array import array
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from eagle_train.data.rows import open_rows
from eagle_train.errors import UserError
from eagle_train.shards import upkeep
from eagle_train.shards.reader import open_shards
from eagle_train.targets import extract as room
from eagle_train.targets import survey as survey_room

from .small import Run, shards_in


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
            UserError,
            match=rf"1\.5 MiB to write, .* free on this disk{advice}.*--online .*--max-disk .*--ignore-disk",
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
    assert shards_in(tmp_path / "out") == ["shard-00000.safetensors", "shard-00001.safetensors"]
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
    with pytest.raises(
        UserError, match=r"row \w{16}-0: features are NaN or infinite.*weights, or give --max-bad"
    ):
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
    assert not (tmp_path / "out" / "shards.json").exists()


def test_a_batch_that_memory_does_not_hold_is_one_line(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def too_much(*arguments: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 9 GiB")

    monkeypatch.setattr(room, "run_batch", too_much)
    with pytest.raises(
        UserError, match=r"out of memory at a batch of \d+ tokens .* --batch-tokens below 256"
    ):
        run()


def test_rows_that_changed_since_they_were_prepared_are_named(
    run: Run, tmp_path: Path, tiny_rows_dir: Path
) -> None:
    rows = shutil.copytree(tiny_rows_dir, tmp_path / "rows")
    row = open_rows(rows).dataset[5]
    (file,) = rows.glob("*.arrow")
    stored, tokens = bytearray(file.read_bytes()), array("i", row["input_ids"]).tobytes()
    assert stored.count(tokens) == 1
    stored[stored.index(tokens)] ^= 1  # another token of the vocabulary
    file.write_bytes(stored)
    with pytest.raises(UserError, match=f"row {row['row_id']}: its tokens or answers are no longer those"):
        run(rows=rows)
    assert not (tmp_path / "out" / "shards.json").exists()


def test_a_token_outside_the_vocabulary_is_named(
    run: Run, tmp_path: Path, make_tiny_target: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    from eagle_train.targets.load import Target

    monkeypatch.setattr(Target, "vocab_size", 40)
    with pytest.raises(UserError, match=r"row \w{16}-0: token \d+ outside the target's vocabulary of 40"):
        run()


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
