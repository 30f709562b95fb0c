"""Damaged files: the good records are found, the bad are named by file and line."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from eagle_train.data import json_stream
from eagle_train.data.json_stream import Damaged
from eagle_train.data.reading import Tally, read_sources
from eagle_train.data.sources import find_sources
from eagle_train.errors import UserError

from .source_files import RECORDS, WANTED, lines, questions, record, write


def bad_places(path: Path) -> tuple[list[str], list[str]]:
    """Read with damage allowed; return the questions found and the places named."""
    tally = Tally()
    found = list(read_sources(find_sources([str(path)]), tally, skip_bad=True))
    with pytest.raises(UserError) as caught:
        list(read_sources(find_sources([str(path)]), Tally()))
    assert tally.bad[0]["place"] in str(caught.value)
    assert "--skip-bad" in str(caught.value)
    return [item.turns[0].content for item in found], [bad["place"] for bad in tally.bad]  # type: ignore[union-attr]


def test_a_half_written_last_line(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", lines()[:-20])
    assert bad_places(path) == (WANTED[:4], [f"{path}:5 (record 5)"])


def test_a_damaged_line_in_the_middle(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", lines().replace('"Question 2"', "Question 2"))
    assert bad_places(path) == ([*WANTED[:2], *WANTED[3:]], [f"{path}:3 (record 3)"])


@pytest.mark.parametrize("indent", [None, 2])
@pytest.mark.parametrize("short", [3, 20, 60])
def test_an_array_cut_off_in_the_middle(tmp_path: Path, indent: int | None, short: int) -> None:
    text = json.dumps(RECORDS, indent=indent)[:-short]
    path = write(tmp_path / "a.json", text)
    found, places = bad_places(path)
    line = text[: text.rindex('"id"')].rindex("{")
    assert (found, places) == (WANTED[:4], [f"{path}:{text.count(chr(10), 0, line) + 1} (record 5)"])


def test_an_array_cut_off_between_records(tmp_path: Path) -> None:
    whole = json.dumps(RECORDS)
    path = write(tmp_path / "a.json", whole[:-1] + ",")
    assert bad_places(path)[0] == WANTED
    path = write(tmp_path / "a.json", whole[:-1])
    assert bad_places(path)[0] == WANTED


def test_an_array_with_a_hole_goes_on_at_the_next_record(tmp_path: Path) -> None:
    text = json.dumps(RECORDS, indent=1)
    middle = text.index("Question 2")
    path = write(tmp_path / "a.json", text[: middle - 10] + text[middle + 30 :])
    found, places = bad_places(path)
    assert found == [*WANTED[:2], *WANTED[3:]]
    assert len(places) == 1


def test_text_behind_the_array_is_named(tmp_path: Path) -> None:
    path = write(tmp_path / "a.json", json.dumps(RECORDS[:2]) + json.dumps(RECORDS[2:]))
    found, places = bad_places(path)
    assert found == WANTED
    assert len(places) == 1


def test_lone_surrogates_and_broken_utf8(tmp_path: Path) -> None:
    bad = lines([RECORDS[0], record(1, "a\ud800b"), RECORDS[2]]).encode()
    path = write(tmp_path / "a.jsonl", bad + lines([record(3, "XX")]).encode().replace(b"XX", b"\xff\xfe"))
    assert bad_places(path) == (
        ["Question 0", "Question 2"],
        [f"{path}:2 (record 2)", f"{path}:4 (record 4)"],
    )
    array = write(tmp_path / "a.json", json.dumps([RECORDS[0], record(1, "a\ud800b"), RECORDS[2]], indent=1))
    assert bad_places(array)[0] == ["Question 0", "Question 2"]


def test_a_compressed_file_cut_off(tmp_path: Path) -> None:
    import random

    draw = random.Random(0)
    many = [record(number, "".join(draw.choices("abcdefgh ", k=2000))) for number in range(200)]
    for name in ("a.jsonl.gz", "a.json.gz"):
        whole = lines(many) if name.startswith("a.jsonl") else json.dumps(many)
        raw = gzip.compress(whole.encode())
        path = tmp_path / name
        path.write_bytes(raw[: len(raw) // 2])
        found, places = bad_places(path)
        assert 50 < len(found) < 150
        assert len(places) == 1
        with pytest.raises(UserError, match="ended before"):
            questions([path])


def test_a_damaged_parquet_file(tmp_path: Path) -> None:
    path = write(tmp_path / "a.parquet", b"PAR1 nothing of the kind")
    assert bad_places(path) == ([], [f"{path}:1 (record 1)"])


def test_small_blocks_change_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The window over the file may end anywhere: inside a string, an escape, a character."""
    records = [record(number, 'a "quoted" \\ é 🙂 line\n' * number) for number in range(20)]
    text = json.dumps(records, ensure_ascii=False, indent=1)
    escaped = json.dumps(records, indent=1)
    for size in (1, 2, 3, 7, 64, 1000):
        monkeypatch.setattr(json_stream, "_BLOCK", size)
        for content in (text, escaped):
            with open(write(tmp_path / "a.json", content), "rb") as handle:
                found = list(json_stream.read_values(handle))
            assert [value for _, value in found] == records
            wanted = [n for n, line in enumerate(content.split("\n"), 1) if line == " {"]
            assert [line for line, _ in found] == wanted
    monkeypatch.setattr(json_stream, "_BLOCK", 5)
    with open(write(tmp_path / "a.json", text[:-30]), "rb") as handle:
        found = list(json_stream.read_values(handle))
    assert [value for _, value in found[:-1]] == records[:-1]
    assert isinstance(found[-1][1], Damaged)
    assert "cut off in the middle" in found[-1][1].what


def test_hostile_json_is_damage_not_a_crash(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", "[" * 200_000 + "\n" + lines(RECORDS[:1]) + "1" * 5000 + "\n")
    assert bad_places(path)[0] == WANTED[:1]
    deep = write(tmp_path / "a.json", '[{"id": ' + "[" * 200_000 + "," + json.dumps(RECORDS)[1:])
    assert bad_places(deep)[0] == WANTED


def test_damage_is_named_whatever_the_weight(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", lines([record(number) for number in range(50)]) + "{\n" * 20)
    tally = Tally()
    list(read_sources(find_sources([f"{path}=0.01"]), tally, skip_bad=True))
    assert tally.num_bad == len(tally.bad) == 20


def test_damage_without_end_is_counted_and_its_first_places_named(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", "{\n" * 3000 + lines())
    tally = Tally()
    assert len(list(read_sources(find_sources([str(path)]), tally, skip_bad=True))) == len(RECORDS)
    assert (tally.num_bad, len(tally.bad), tally.read) == (3000, 1000, len(RECORDS))
    assert tally.bad[-1]["place"].endswith(":1000 (record 1000)")
