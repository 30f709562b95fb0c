"""Every file form, whole and damaged: the good records are found, the bad are named by file and line."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from eagle_train.data import json_stream
from eagle_train.data.json_stream import Damaged
from eagle_train.data.reading import Tally, copies, read_sources
from eagle_train.data.records import Conversation
from eagle_train.data.sources import find_sources
from eagle_train.errors import UserError


def record(number: int, text: str = "Hello", **fields: Any) -> dict[str, Any]:
    turns = [{"from": "human", "value": f"Question {number}"}, {"from": "gpt", "value": text}]
    return {"id": number, "conversations": turns, **fields}


def read(*names: str) -> list[Conversation]:
    found = list(read_sources(find_sources(list(names)), Tally()))
    assert all(isinstance(item, Conversation) for item in found)
    return found  # type: ignore[return-value]


def questions(data: list[Path]) -> list[str]:
    return [conversation.turns[0].content for conversation in read(*map(str, data))]


WANTED = [f"Question {number}" for number in range(5)]
RECORDS = [record(number) for number in range(5)]


def lines(records: list[Any] = RECORDS) -> str:
    return "".join(json.dumps(item) + "\n" for item in records)


def write(path: Path, content: str | bytes) -> Path:
    raw = content if isinstance(content, bytes) else content.encode("utf-8")
    path.write_bytes(gzip.compress(raw) if path.name.lower().endswith(".gz") else raw)
    return path


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.jsonl", lines()),
        ("a.jsonl", lines().strip()),
        ("a.jsonl", "\ufeff" + lines()),
        ("a.jsonl", lines().replace("\n", "\r\n\n  \n")),
        ("a.jsonl", json.dumps(RECORDS)),
        ("a.jsonl", json.dumps(RECORDS, indent=1)),
        ("a.ndjson", lines()),
        ("a.jsonl.gz", lines()),
        ("a.json.gz", json.dumps(RECORDS)),
        ("a.json", json.dumps(RECORDS)),
        ("a.json", "\ufeff" + json.dumps(RECORDS, indent=2)),
        ("a.json", lines()),
        ("a.json", "\n".join(json.dumps(item, indent=2) for item in RECORDS)),
        ("a.json", json.dumps({"data": RECORDS, "version": 2})),
        ("A.JSON", json.dumps(RECORDS)),
        ("A.JSONL", lines()),
        ("A.JSONL.GZ", lines()),
        ("A.Json.Gz", json.dumps(RECORDS)),
    ],
)
def test_text_forms(tmp_path: Path, name: str, content: str) -> None:
    assert questions([write(tmp_path / name, content)]) == WANTED


def test_one_object_is_one_record(tmp_path: Path) -> None:
    assert questions([write(tmp_path / "a.json", json.dumps(RECORDS[0], indent=2))]) == WANTED[:1]


def test_parquet_and_a_saved_dataset(tmp_path: Path) -> None:
    import datasets

    dataset = datasets.Dataset.from_list([{**item, "id": str(item["id"])} for item in RECORDS])
    dataset.to_parquet(str(tmp_path / "a.parquet"))
    dataset.save_to_disk(str(tmp_path / "saved"))
    assert questions([tmp_path / "a.parquet"]) == WANTED
    assert questions([(tmp_path / "a.parquet").rename(tmp_path / "B.PARQUET")]) == WANTED
    assert questions([tmp_path / "saved"]) == WANTED


def test_folders_globs_and_order(tmp_path: Path) -> None:
    (tmp_path / "in" / "deep").mkdir(parents=True)
    write(tmp_path / "in" / "b.jsonl", lines(RECORDS[2:4]))
    write(tmp_path / "in" / "a.json", json.dumps(RECORDS[:2]))
    write(tmp_path / "in" / "deep" / "c.jsonl.gz", lines(RECORDS[4:]))
    write(tmp_path / "in" / "notes.txt", "nothing")
    assert questions([tmp_path / "in"]) == WANTED
    assert questions([tmp_path / "in" / "*.json*"]) == WANTED[:4]
    assert questions([tmp_path / "in" / "**" / "*.gz", tmp_path / "in" / "a.json"]) == [
        WANTED[4],
        *WANTED[:2],
    ]


def test_fields_that_change_type_do_not_break_the_load(tmp_path: Path) -> None:
    mixed = [record(0, extra=1), record(1, extra="a"), record(2, extra={"b": None}), record(3), record(4)]
    mixed[1]["id"], mixed[2]["id"] = "one", None
    assert questions([write(tmp_path / "a.jsonl", lines(mixed))]) == WANTED
    assert questions([write(tmp_path / "a.json", json.dumps(mixed))]) == WANTED


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ("missing.jsonl", "missing.jsonl: no such file or folder"),
        ("./missing", "no such file or folder"),
        ("*.jsonl", "no file of this pattern"),
        ("notes.txt", "unknown file form '.txt'"),
        ("empty", "no data files in this folder"),
    ],
)
def test_names_that_lead_nowhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, data: str, message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    write(tmp_path / "notes.txt", "nothing")
    with pytest.raises(UserError) as caught:
        find_sources([data])
    assert message in str(caught.value)


@pytest.mark.usefixtures("no_hub")
def test_a_hub_dataset_is_loaded_by_name_and_split(monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    made = datasets.Dataset.from_list([{**item, "id": str(item["id"]), "score": 1.0} for item in RECORDS])
    halves = datasets.DatasetDict(train_sft=made.select(range(2)), test=made.select(range(2, 5)))
    asked = []
    monkeypatch.setattr(datasets, "load_dataset", lambda name: asked.append(name) or halves)
    assert read("owner/chats:train_sft")[1].turns[0].content == "Question 1"
    assert len(read("owner/chats:test")) == 3
    assert len(read("owner/chats:test=2")) == 6
    assert asked == ["owner/chats"] * 3
    with pytest.raises(
        UserError, match="wanted one of the splits train_sft, test; name it as owner/chats:train_sft"
    ):
        find_sources(["owner/chats"])


@pytest.mark.usefixtures("no_hub")
def test_a_hub_dataset_that_cannot_be_had(monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    def offline(name: str) -> None:
        raise ConnectionError(f"Couldn't reach '{name}' on the Hub (OfflineModeIsEnabled)")

    monkeypatch.setattr(datasets, "load_dataset", offline)
    with pytest.raises(UserError, match="owner/chats: no such file or folder, and as a hub dataset"):
        find_sources(["owner/chats"])


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


def test_moving_a_file_changes_nothing(tmp_path: Path) -> None:
    (tmp_path / "b").mkdir()
    one, two = write(tmp_path / "a.jsonl", lines()), write(tmp_path / "b" / "a.jsonl", lines())
    assert find_sources([str(one)])[0].identity == find_sources([str(two)])[0].identity
    write(two, lines(RECORDS[1:]))
    assert find_sources([str(one)])[0].identity != find_sources([str(two)])[0].identity


def test_an_empty_name_is_not_the_current_folder():
    with pytest.raises(UserError, match="DATA: got an empty name"):
        find_sources([""])


@pytest.mark.parametrize("weight", [0.01, 0.25, 0.5, 0.9, 1.0, 1.5, 3.0])
def test_weights_take_their_share_of_every_stretch_and_of_every_period(weight: float) -> None:
    taken = [copies(number, weight) for number in range(1, 4001)]
    assert set(taken) <= {int(weight), int(weight) + 1}
    for part in (taken, taken[1000:2000], taken[::2], taken[1::2], taken[::10]):
        assert abs(sum(part) - len(part) * weight) <= 12


def test_weights_of_a_mixture(tmp_path: Path) -> None:
    write(tmp_path / "half.jsonl", lines([record(number) for number in range(100)]))
    write(tmp_path / "twice.jsonl", lines())
    write(tmp_path / "a=0.5.jsonl", lines())
    names = [f"{tmp_path}/half.jsonl=0.5", f"{tmp_path}/twice.jsonl=2", f"{tmp_path}/a=0.5.jsonl"]
    tally = Tally()
    found = list(read_sources(find_sources(names), tally))
    asked = [item.turns[0].content for item in found]  # type: ignore[union-attr]
    assert 48 <= len(asked) - 15 <= 52
    assert len(set(asked[:-15])) == len(asked) - 15
    assert asked[-15:] == [text for text in WANTED for _ in range(2)] + WANTED
    assert (tally.left_out, tally.repeated) == (100 - (len(asked) - 15), 5)
    assert [source.identity.get("weight") for source in find_sources(names)] == [0.5, 2.0, None]
    assert [item.source for item in read(names[0])] == [item.source for item in found[:-15]]


@pytest.mark.parametrize("weight", ["0", "-1", "nan", "inf", "101"])
def test_weights_that_are_none(tmp_path: Path, weight: str) -> None:
    path = write(tmp_path / "a.jsonl", lines())
    with pytest.raises(UserError, match=f"a.jsonl={weight}: weight {weight}, wanted more than 0"):
        find_sources([f"{path}={weight}"])


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
