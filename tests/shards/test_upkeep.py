"""Care of shard directories: nothing is lost, nothing foreign gets in, what was removed comes back."""

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
from eagle_train.shards.pruning import prune
from eagle_train.shards.reader import Shards, open_shards
from eagle_train.targets.extract import extract

from .conftest import bytes_of, flip


def _same_rows(one: Shards, other: Shards, rows: list[int] | None = None) -> None:
    """Row i of `one` is row rows[i] of `other`, in every field."""
    rows = list(range(other.num_rows)) if rows is None else rows
    assert one.num_rows == len(rows)
    for i, j in enumerate(rows):
        a, b = one.read(i), other.read(j)
        assert a.spans == b.spans
        for name in ("input_ids", "aux", "label_last", "label_argmax", "label_lse"):
            assert torch.equal(getattr(a, name), getattr(b, name))
        assert (one.row_ids[i], one.conversation_ids[i]) == (other.row_ids[j], other.conversation_ids[j])


def test_split_and_merged_again_it_is_the_same(tiny_shards_dir: Path, tmp_path: Path) -> None:
    whole = open_shards(tiny_shards_dir)
    made = upkeep.split(tiny_shards_dir, tmp_path / "parts", 3, show=False)
    parts = [tmp_path / "parts" / f"part-{i}" for i in range(3)]
    assert [part["shards"] for part in made] == [len(whole.info["shards"][i::3]) for i in range(3)]
    owner = whole._index["shard"].tolist()
    for i, part in enumerate(parts):
        _same_rows(open_shards(part), whole, [row for row, shard in enumerate(owner) if shard % 3 == i])
        for entry, file in zip(open_shards(part).info["shards"], sorted(part.glob("shard-*")), strict=True):
            origin = whole.info["shards"][open_shards(part).info["shards"].index(entry) * 3 + i]
            assert entry["checksum"] == origin["checksum"]
            assert file.read_bytes() == (tiny_shards_dir / origin["file"]).read_bytes()
    upkeep.merge([parts[1], parts[0], parts[2]], tmp_path / "merged", show=False)
    merged = open_shards(tmp_path / "merged")
    _same_rows(merged, whole)
    assert merged.supervised_frequencies == whole.supervised_frequencies
    assert torch.equal(merged.frozen_target().embedding, whole.frozen_target().embedding)
    for file in tiny_shards_dir.glob("shard-*"):
        assert (tmp_path / "merged" / file.name).read_bytes() == file.read_bytes()


@pytest.fixture
def other_rows(tmp_path: Path, tiny_target_dir: Path) -> Path:
    """Two more conversations, prepared."""
    from eagle_train.data.prepare import prepare

    lines = []
    for i in range(2):
        turns = [("user", f"Other question {i}?"), ("assistant", f"Another answer {i}, of some length.")]
        messages = [{"role": role, "content": text} for role, text in turns]
        lines.append(json.dumps({"id": f"o{i}", "messages": messages}))
    (tmp_path / "more.jsonl").write_text("\n".join(lines) + "\n")
    prepare([str(tmp_path / "more.jsonl")], str(tiny_target_dir), tmp_path / "rows", show=False)
    return tmp_path / "rows"


Make = Callable[..., Path]


@pytest.fixture
def more(other_rows: Path, tiny_target_dir: Path, tmp_path: Path) -> Make:
    """Extract the other conversations with some settings."""

    def make(target: Path = tiny_target_dir, **change: Any) -> Path:
        settings: dict[str, Any] = {"codec": "fp32", "dtype": "fp32", "device": "cpu", **change}
        extract(other_rows, target, tmp_path / "more", show=False, **settings)
        return tmp_path / "more"

    return make


def test_two_extractions_become_one_to_train_on(tiny_shards_dir: Path, more: Make, tmp_path: Path) -> None:
    second = more()
    found = upkeep.merge([tiny_shards_dir, second], tmp_path / "merged", show=False)
    one, two, both = (open_shards(place) for place in (tiny_shards_dir, second, tmp_path / "merged"))
    assert found["rows"] == both.num_rows == 26
    _same_rows(one, both, list(range(24)))
    _same_rows(two, both, [24, 25])
    added = {token: two.supervised_frequencies.get(token, 0) for token in both.supervised_frequencies}
    assert both.supervised_frequencies == {
        token: one.supervised_frequencies.get(token, 0) + count for token, count in added.items()
    }
    assert not upkeep.verify(tmp_path / "merged", show=False)["faults"]
    again = upkeep.merge([tiny_shards_dir, second], tmp_path / "again", show=False)
    assert again["tokens"] == found["tokens"]
    assert (tmp_path / "again" / "shards.json").read_bytes() == (
        tmp_path / "merged" / "shards.json"
    ).read_bytes()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"codec": "bf16"}, "codec bf16, .* has fp32"),
        ({"layer_ids": (1, 4, 5)}, r"layers \[1, 4, 5\], .* has \[2, 4, 5\]"),
        ({"features": "all"}, "--for all, .* has eagle3"),
        ({"dtype": "bf16"}, "target dtype bf16, .* has fp32"),
    ],
)
def test_shards_made_otherwise_are_not_merged(
    tiny_shards_dir: Path, more: Make, tmp_path: Path, change: dict[str, Any], words: str
) -> None:
    with pytest.raises(UserError, match=words):
        upkeep.merge([tiny_shards_dir, more(**change)], tmp_path / "merged", show=False)
    assert not (tmp_path / "merged").exists()


def test_shards_of_other_weights_are_not_merged(
    tiny_shards_dir: Path, more: Make, tmp_path: Path, make_tiny_target: Callable[..., Path]
) -> None:
    second = more(target=make_tiny_target(tmp_path / "other", seed=1))
    with pytest.raises(UserError, match=r"target fingerprint \w{16}, .* has \w{16}"):
        upkeep.merge([tiny_shards_dir, second], tmp_path / "merged", show=False)


def test_rows_are_not_merged_twice(tiny_shards_dir: Path, copied: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"row \w{16}-0 is in .* too"):
        upkeep.merge([tiny_shards_dir, copied], tmp_path / "merged", show=False)


def test_damaged_shards_are_not_merged_or_split(copied: Path, more: Make, tmp_path: Path) -> None:
    flip(copied / "shard-00001.safetensors")
    for work in (
        lambda: upkeep.merge([copied, more()], tmp_path / "out", show=False),
        lambda: upkeep.split(copied, tmp_path / "out", 2, show=False),
    ):
        with pytest.raises(UserError, match=r"shard-00001\.safetensors: tensor \w+ is damaged"):
            work()
    assert not (tmp_path / "out").exists()


def test_one_shard_cannot_be_split(tiny_shards_dir: Path, tmp_path: Path) -> None:
    shards = len(open_shards(tiny_shards_dir).info["shards"])
    upkeep.split(tiny_shards_dir, tmp_path / "parts", shards, show=False)
    one = tmp_path / "parts" / "part-0"
    with pytest.raises(
        UserError, match=r"part-0: holds 1 shard, which cannot be split; extract with a smaller"
    ):
        upkeep.split(one, tmp_path / "out", 2, show=False)


def test_a_directory_with_other_things_in_it_is_not_written_to(tiny_shards_dir: Path, tmp_path: Path) -> None:
    (tmp_path / "out" / "part-0").mkdir(parents=True)
    (tmp_path / "out" / "part-0" / "thesis.tex").write_text("x")
    with pytest.raises(UserError, match=r"part-0: holds thesis\.tex already"):
        upkeep.split(tiny_shards_dir, tmp_path / "out", 2, show=False)


def test_files_are_copied_where_they_cannot_be_linked(
    tiny_shards_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*names: Any) -> None:
        raise OSError(18, "Invalid cross-device link")

    monkeypatch.setattr(upkeep.os, "link", refuse)
    upkeep.split(tiny_shards_dir, tmp_path / "out", 2, show=False)
    assert not upkeep.verify(tmp_path / "out" / "part-0", show=False)["faults"]


def test_extraction_does_not_go_on_in_merged_shards(
    tiny_shards_dir: Path, tiny_rows_dir: Path, tiny_target_dir: Path, tmp_path: Path
) -> None:
    upkeep.split(tiny_shards_dir, tmp_path / "out", 2, show=False)
    with pytest.raises(UserError, match="holds shards that were merged or split; choose another --out"):
        extract(tiny_rows_dir, tiny_target_dir, tmp_path / "out" / "part-0", codec="fp32", show=False)


def test_pruned_shards_leave_the_others_to_train_on_and_extract_makes_them_anew(
    copied: Path, tiny_rows_dir: Path, tiny_target_dir: Path
) -> None:
    before, whole = bytes_of(copied), open_shards(copied)
    row = int((whole._index["shard"] == 4).nonzero()[0, 0])
    flip(copied / "shard-00000.safetensors")
    found = prune(copied, shards=[2], rows=[whole.row_ids[row]], damaged=True, show=False)
    assert found["removed"] == [f"shard-{n:05d}.safetensors" for n in (0, 2, 4)]
    with pytest.raises(UserError, match="--shard 2"):  # numbers do not move
        prune(copied, shards=[2], show=False)
    left = open_shards(copied)
    kept = [i for i, shard in enumerate(whole._index["shard"].tolist()) if shard not in (0, 2, 4)]
    shutil.copy(copied / "shard-00001.safetensors", copied / "shard-00000.safetensors")  # `whole` maps anew
    _same_rows(left, whole, kept)
    assert sum(left.supervised_frequencies.values()) == left.info["labels"]
    (copied / "shard-00000.safetensors").unlink()
    summary = extract(
        tiny_rows_dir, tiny_target_dir, copied, codec="fp32", dtype="fp32", device="cpu", show=False
    )
    assert summary["shards_done_here"] == 3
    assert bytes_of(copied) == before


def test_what_is_not_there_is_not_pruned(copied: Path) -> None:
    with pytest.raises(UserError, match=r"--shard 99: .* holds no shard-00099\.safetensors"):
        prune(copied, shards=[99])
    with pytest.raises(UserError, match=r"--row nobody: no shard of .* holds it"):
        prune(copied, rows=["nobody"])
    assert prune(copied, damaged=True, show=False)["removed"] == []
    open_shards(copied)


def test_categories_stay_with_their_rows_whatever_becomes_of_the_shards(
    tiny_shards_dir: Path, tiny_conversations: Path, tiny_target_dir: Path, tmp_path: Path
) -> None:
    """Extracted, cut apart, put together with shards that know of none, and listed anew."""
    from eagle_train.data.prepare import prepare

    talks = [json.loads(line) for line in tiny_conversations.read_text().splitlines()]
    talks = [{**talk, "category": f"kind {i % 3}"} if i % 4 else talk for i, talk in enumerate(talks)]
    for talk in talks:
        talk["messages"][0]["content"] += " Tell me."  # no row of the other shards
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(talk) + "\n" for talk in talks))
    prepare([str(tmp_path / "a.jsonl")], str(tiny_target_dir), tmp_path / "rows", show=False)
    how: dict[str, Any] = {"codec": "fp32", "dtype": "fp32", "device": "cpu", "batch_tokens": 512}
    extract(tmp_path / "rows", tiny_target_dir, tmp_path / "shards", show=False, **how)
    wanted = [talk.get("category", "") for talk in talks]
    named = open_shards(tmp_path / "shards")
    assert len(named.info["shards"]) > 1
    assert named.categories == wanted
    without = open_shards(tiny_shards_dir)
    assert without.categories == [""] * 24
    assert "categories" not in without._index
    assert b"categories" not in (tiny_shards_dir / "shard-00000.safetensors").read_bytes()
    upkeep.merge([tiny_shards_dir, tmp_path / "shards"], tmp_path / "merged", show=False)
    assert open_shards(tmp_path / "merged").categories == [*[""] * 24, *wanted]
    assert not upkeep.verify(tmp_path / "merged", show=False)["faults"]
    upkeep.split(tmp_path / "merged", tmp_path / "parts", 2, show=False)
    by_row = dict(zip(named.row_ids, named.categories, strict=True))
    for part in (tmp_path / "parts" / "part-0", tmp_path / "parts" / "part-1"):
        found = open_shards(part)
        assert found.categories == [by_row.get(row, "") for row in found.row_ids]
        assert any(found.categories)
