"""Reading shards: rows as they were prepared, features of their own kind, faults named."""

from __future__ import annotations

import pickle
import shutil
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from eagle_train.data.rows import open_rows
from eagle_train.errors import UserError
from eagle_train.shards import reader
from eagle_train.shards.files import ShardFile, open_shard
from eagle_train.shards.reader import open_shards


def test_rows_come_in_the_prepared_order_with_their_tokens_and_spans(
    tiny_shards_dir: Path, tiny_rows_dir: Path
) -> None:
    shards, rows = open_shards(tiny_shards_dir), open_rows(tiny_rows_dir)
    assert shards.num_rows == len(shards) == len(rows)
    assert len(shards.info["shards"]) > 3
    for i, row in enumerate(rows.dataset):
        read = shards.read(i)
        assert read.input_ids.tolist() == row["input_ids"]
        assert read.spans == [tuple(span) for span in row["spans"]]
        assert shards.lengths[i] == len(row["input_ids"])
    assert shards.row_ids == rows.dataset["row_id"][:]
    assert shards.conversation_ids == rows.dataset["conversation_id"][:]
    assert shards.supervised_frequencies == {
        int(token): count for token, count in rows.info["supervised_frequencies"].items()
    }


def test_some_rows_have_several_answers_and_labels_follow_them(tiny_shards_dir: Path) -> None:
    shards = open_shards(tiny_shards_dir)
    assert any(len(spans) > 1 for spans in shards.spans)
    for i, spans in enumerate(shards.spans):
        read = shards.read(i)
        count = sum(e - s + 1 for s, e in spans)
        assert len(read.label_last) == len(read.label_argmax) == len(read.label_lse) == count
        assert read.label_argmax.dtype == torch.int64
        assert read.label_lse.dtype == torch.float32


def test_each_kind_holds_what_it_says(tiny_shards_dir: Path, tiny_shards_eagle1_dir: Path) -> None:
    three, one = open_shards(tiny_shards_dir), open_shards(tiny_shards_eagle1_dir)
    for i in range(three.num_rows):
        a, b = three.read(i), one.read(i)
        assert a.aux is not None
        assert a.aux.shape == (len(a.input_ids), 3 * 32)
        assert a.last_all is None
        assert b.aux is None
        assert b.last_all is not None
        assert b.last_all.shape == (len(b.input_ids), 32)
        assert torch.equal(a.label_last, b.label_last)
        assert torch.equal(a.label_argmax, b.label_argmax)
        positions = [t for s, e in b.spans for t in range(s - 1, e)]
        assert torch.equal(b.label_last, b.last_all[positions])


def test_tensors_are_views_into_the_mapped_file(tiny_shards_dir: Path) -> None:
    shards = open_shards(tiny_shards_dir)
    first, again = shards.read(3), shards.read(3)
    assert first.aux is not None
    assert again.aux is not None
    assert first.aux.data_ptr() == again.aux.data_ptr()


def test_shards_travel_to_other_processes(tiny_shards_dir: Path) -> None:
    shards = open_shards(tiny_shards_dir)
    want = shards.read(5)
    got = pickle.loads(pickle.dumps(shards)).read(5)
    assert got.aux is not None
    assert torch.equal(got.aux, want.aux)


@pytest.mark.parametrize(("bound", "most"), [("_MOST_OPEN", 2), ("_MOST_MAPPED", 130_000)])
def test_many_shards_do_not_stay_open(
    tiny_shards_dir: Path, monkeypatch: pytest.MonkeyPatch, bound: str, most: int
) -> None:
    monkeypatch.setattr(reader, bound, most)
    opened: list[Path] = []
    monkeypatch.setattr(reader, "open_shard", lambda path: (opened.append(path), open_shard(path))[1])
    shards = open_shards(tiny_shards_dir)
    kept = [shards.read(i) for i in [*range(shards.num_rows)] * 2]
    assert len(shards._open) <= 2 < len(opened)
    assert len(opened) == len(set(opened)), "headers are read once, however often a shard is mapped"
    again = [open_shards(tiny_shards_dir).read(i) for i in range(shards.num_rows)]
    assert all(torch.equal(a.label_last, b.label_last) for a, b in zip(kept, again * 2, strict=True))


def test_the_frozen_target_needs_no_model(tiny_shards_dir: Path) -> None:
    shards = open_shards(tiny_shards_dir)
    frozen = shards.frozen_target()
    assert frozen.tied
    assert frozen.config["num_hidden_layers"] == 8
    row = shards.read(0)
    logits = frozen.logits(row.label_last)
    assert torch.equal(logits.argmax(-1), row.label_argmax)
    torch.testing.assert_close(logits.logsumexp(-1), row.label_lse)


def test_a_folder_that_is_not_finished_says_so(tmp_path: Path, tiny_shards_dir: Path) -> None:
    with pytest.raises(UserError, match="no such folder"):
        open_shards(tmp_path / "nothing")
    with pytest.raises(UserError, match="not a folder of shards"):
        open_shards(tmp_path)
    shutil.copy(tiny_shards_dir / "plan.json", tmp_path)
    with pytest.raises(UserError, match="extraction is not finished; run the same eagle extract again"):
        open_shards(tmp_path)


def test_a_missing_shard_is_named_when_it_is_met(copied: Path) -> None:
    (copied / "shard-00002.safetensors").unlink()
    shards = open_shards(copied)
    with pytest.raises(UserError, match=r"shard-00002\.safetensors: missing"):
        for i in range(shards.num_rows):
            shards.read(i)


def test_a_shard_of_another_extraction_is_named(copied: Path, tiny_shards_eagle1_dir: Path) -> None:
    shutil.copy(tiny_shards_eagle1_dir / "shard-00002.safetensors", copied)
    shards = open_shards(copied)
    with pytest.raises(UserError, match=r"shard-00002\.safetensors: not the shard that shards\.json lists"):
        for i in range(shards.num_rows):
            shards.read(i)


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The shards whose checksums are compared, in order."""
    own, names = ShardFile.verify, []

    def verify(self: ShardFile) -> None:
        names.append(self.path.name)
        own(self)

    monkeypatch.setattr(ShardFile, "verify", verify)
    return names


def test_processes_verify_every_shard_once_between_them(tiny_shards_dir: Path, seen: list[str]) -> None:
    for rank in range(3):
        shards = open_shards(tiny_shards_dir, rank=rank, world=3)
        shards.verify_rows(range(shards.num_rows))
        for row in (*range(shards.num_rows), *range(shards.num_rows)):
            shards.read(row)
    assert sorted(seen) == [entry["file"] for entry in shards.info["shards"]]


def test_a_process_verifies_its_share_of_what_all_are_about_to_read(copied: Path) -> None:
    victim = copied / "shard-00003.safetensors"
    content = bytearray(victim.read_bytes())
    content[-3] ^= 4
    victim.write_bytes(content)
    one, two = (open_shards(copied, rank=rank, world=2) for rank in range(2))
    rows = [row for row in range(one.num_rows) if int(one._index["shard"][row]) == 3]
    one.verify_rows(rows)  # the other's
    with pytest.raises(UserError, match=r"shard-00003\.safetensors: tensor \w+ is damaged"):
        two.verify_rows(rows)


def test_two_threads_do_not_verify_a_shard_twice(tiny_shards_dir: Path, seen: list[str]) -> None:
    shards = open_shards(tiny_shards_dir)
    gate = threading.Barrier(8)

    def read(row: int) -> None:
        gate.wait()
        shards.read(row)

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(read, [0] * 8))
    assert len(seen) == 1


def test_a_row_out_of_range_is_an_index_error(tiny_shards_dir: Path) -> None:
    shards = open_shards(tiny_shards_dir)
    with pytest.raises(IndexError):
        shards.read(shards.num_rows)
