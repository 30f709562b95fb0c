"""A shard that is cut, flipped or not a shard is named, never read as if it were whole."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from eagle_train.errors import UserError
from eagle_train.io.tensors import load_tensors, save_tensors
from eagle_train.shards.files import open_shard
from eagle_train.shards.schema import HEADER_KEY


@pytest.fixture
def shard(tmp_path: Path, tiny_shards_dir: Path) -> Path:
    return Path(shutil.copy(tiny_shards_dir / "shard-00001.safetensors", tmp_path / "shard.safetensors"))


def test_mapped_tensors_equal_the_files_contents(shard: Path) -> None:
    mapped = open_shard(shard).map()
    read, _ = load_tensors(shard)
    assert mapped.keys() == read.keys()
    assert all(torch.equal(mapped[name], read[name]) for name in read)


def test_maps_hold_no_file_descriptors_and_may_be_written_to(shard: Path) -> None:
    resource = pytest.importorskip("resource")
    before, content = resource.getrlimit(resource.RLIMIT_NOFILE), shard.read_bytes()
    first_free = os.dup(0)
    os.close(first_free)
    resource.setrlimit(resource.RLIMIT_NOFILE, (first_free + 3, before[1]))
    try:
        maps = [open_shard(shard).map() for _ in range(20)]
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
    maps[0]["input_ids"] += 1
    assert not torch.equal(maps[0]["input_ids"], maps[1]["input_ids"])
    assert shard.read_bytes() == content


def test_a_shard_that_goes_or_shrinks_before_it_is_mapped_is_named(shard: Path) -> None:
    opened = open_shard(shard)
    shard.write_bytes(shard.read_bytes()[:-4096])
    with pytest.raises(UserError, match=r"shard\.safetensors: .*cut off or damaged"):
        opened.map()
    shard.unlink()
    with pytest.raises(UserError, match=r"shard\.safetensors: missing"):
        opened.map()


def test_a_whole_shard_passes_its_checksums(shard: Path) -> None:
    open_shard(shard).verify()


def test_a_flipped_bit_is_found_and_its_tensor_named(shard: Path) -> None:
    dtype, _, first = open_shard(shard).layout["label_lse"]
    assert dtype == torch.float32
    content = bytearray(shard.read_bytes())
    content[first + 5] ^= 0x10
    shard.write_bytes(content)
    with pytest.raises(UserError, match=r"shard\.safetensors: tensor label_lse is damaged"):
        open_shard(shard).verify()


@pytest.mark.parametrize("kept", [0, 5, 100, -1000, -1])
def test_a_cut_shard_is_refused_before_a_tensor_is_read(shard: Path, kept: int) -> None:
    shard.write_bytes(shard.read_bytes()[:kept])
    with pytest.raises(
        UserError, match=r"shard\.safetensors: .*(cut off|damaged).*run the same eagle extract"
    ):
        open_shard(shard)


def test_bytes_at_the_end_are_refused(shard: Path) -> None:
    shard.write_bytes(shard.read_bytes() + b"\0")
    with pytest.raises(UserError, match="cut off or damaged"):
        open_shard(shard)


def test_a_damaged_header_is_refused(shard: Path) -> None:
    content = bytearray(shard.read_bytes())
    content[40:60] = b"\xff" * 20
    shard.write_bytes(content)
    with pytest.raises(UserError, match="damaged header"):
        open_shard(shard)


def test_tensors_that_begin_at_no_whole_value_are_refused(shard: Path) -> None:
    content = shard.read_bytes()
    length = int.from_bytes(content[:8], "little")
    header = content[8 : 8 + length] + b" "
    shard.write_bytes((length + 1).to_bytes(8, "little") + header + content[8 + length :])
    with pytest.raises(UserError, match=r"damaged header \(tensor \w+ begins inside a value\)"):
        open_shard(shard)


@pytest.mark.parametrize(
    "change",
    [{"plan": 3}, {"row_ids": [1]}, {"target": None}, {"checksums": []}, {"skipped": {}}, {"tokens": "5"}],
)
def test_an_edited_header_is_refused(shard: Path, change: dict[str, Any]) -> None:
    tensors, metadata = load_tensors(shard)
    header = {**json.loads(metadata[HEADER_KEY]), **change}
    save_tensors(shard, tensors, {HEADER_KEY: json.dumps(header)})
    with pytest.raises(UserError, match=f"damaged header .*{next(iter(change))}"):
        open_shard(shard)


def test_a_shard_without_one_of_its_tensors_is_refused(shard: Path) -> None:
    tensors, metadata = load_tensors(shard)
    del tensors["spans"]
    save_tensors(shard, tensors, metadata)
    with pytest.raises(UserError, match=r"damaged header .*lacks tensor spans"):
        open_shard(shard)


def test_another_safetensors_file_is_no_shard(tmp_path: Path) -> None:
    save_tensors(tmp_path / "other.safetensors", {"x": torch.ones(3)})
    with pytest.raises(UserError, match="damaged header"):
        open_shard(tmp_path / "other.safetensors")


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"shard-00007\.safetensors: missing; run the same eagle extract"):
        open_shard(tmp_path / "shard-00007.safetensors")
