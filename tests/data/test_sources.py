"""Every file form, by name, folder, glob and weight."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from eagle_train.data.reading import Tally, copies, read_sources
from eagle_train.data.sources import find_sources
from eagle_train.errors import UserError

from .source_files import RECORDS, WANTED, lines, questions, read, record, write


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
        ("a.json", json.dumps({"data": RECORDS, "category": "sea"})),
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
