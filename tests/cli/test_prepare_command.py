"""``eagle prepare`` and ``eagle inspect`` as typed: exit codes, one-line errors, what is printed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from eagle_cli.main import main


def eagle(capsys: pytest.CaptureFixture[str], *arguments: str | Path) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as left:
        main([str(argument) for argument in arguments])
    said = capsys.readouterr()
    return int(left.value.code or 0), said.out, said.err


@pytest.fixture
def chats(tmp_path: Path) -> Path:
    records = [
        {"conversations": [{"from": "human", "value": "Hi [b]you[/b]"}, {"from": "gpt", "value": "Hello"}]},
        {"conversations": []},
    ]
    file = tmp_path / "chats.json"
    file.write_text(json.dumps(records))
    return file


def test_prepare_then_inspect(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, tiny_target_dir: Path, chats: Path
) -> None:
    command = ("prepare", chats, "--target", tiny_target_dir, "--out", tmp_path / "rows")
    code, out, err = eagle(capsys, *command)
    assert code == 0
    assert out.splitlines()[0].startswith("1 row, ")
    assert "skipped        1  empty conversation" in out
    assert f"next: eagle extract {tmp_path / 'rows'} --target {tiny_target_dir} --out shards/" in out
    assert "prepare: " in err
    code, out, _ = eagle(capsys, *command)
    assert code == 0
    assert "already there; nothing to do" in out

    code, out, _ = eagle(capsys, "inspect", tmp_path / "rows", "--row", "0", "--tokens")
    assert code == 0
    assert "⟦Hello<|im_end|>⟧" in out
    assert "user\nHi [b]you[/b]<|im_end|>" in out
    assert out.count("⟦") == 2
    assert "\nbetween ⟦ and ⟧: supervised, the answers with their end-of-turn token (one cut" in out
    assert ", answers at tokens " in out
    assert " (from 0, both included)\n" in out
    assert "\nplace, id, + if supervised, text\n     0 " in out
    assert "+ '<|im_end|>'" in out
    assert "skipped        1  empty conversation" in out


def test_json_is_json_alone(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, tiny_target_dir: Path, chats: Path
) -> None:
    command = ("prepare", chats, "--target", tiny_target_dir, "--out", tmp_path / "rows", "--json")
    code, out, _ = eagle(capsys, *command)
    assert code == 0
    assert json.loads(out)["counts"] == {
        "read": 2,
        "kept": 1,
        "repaired": {},
        "skipped": {"empty conversation": 1},
        "truncated": {
            "rows": 0,
            "rows_left_without_answer": 0,
            "answers_dropped": 0,
            "answers_shortened": 0,
            "tokens_cut": 0,
        },
        "bad": 0,
        "copies": 0,
        "copies_dropped": 0,
        "left_out": 0,
        "repeated": 0,
    }
    assert json.loads(out)["skipped_examples"] == {"empty conversation": ["chats.json#2"]}
    code, out, _ = eagle(capsys, "inspect", tmp_path / "rows", "--json")
    described = json.loads(out)
    marked = [part["text"] for part in described["row"]["segments"] if part["supervised"]]
    assert marked == ["Hello<|im_end|>"]
    assert described["rows"]["rows"] == 1
    whole = "".join(part["text"] for part in described["row"]["segments"])
    assert "".join(described["row"]["token_texts"]) == whole


def test_on_a_terminal_supervised_text_is_coloured(
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    tiny_target_dir: Path,
    chats: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from eagle_train.data.inspect import print_coloured

    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm-256color")
    print_coloured([{"supervised": False, "text": "user [b]"}, {"supervised": True, "text": "Hello"}])
    out = capsys.readouterr().out
    assert "\x1b[2muser [b]\x1b[0m" in out
    assert "\x1b[1;32mHello\x1b[0m" in out


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("inspect", "{rows}", "--row", "1"), "no row 1; wanted 0 to 0"),
        (("inspect", "{rows}", "--row", "-1"), "no row -1; wanted 0 to 0"),
        (("inspect", "{folder}"), "rows.json: not found; make the rows with: eagle prepare"),
        (
            ("prepare", "{folder}/no.json", "--target", "{target}", "--out", "{folder}/x"),
            "no such file or folder",
        ),
        (("prepare", "{chats}", "--target", "{folder}/no/model", "--out", "{folder}/x"), "no such directory"),
        (
            ("prepare", "{chats}", "--target", "{target}", "--out", "{rows}", "--max-length", "9"),
            "--overwrite",
        ),
        (
            ("prepare", "{chats}", "--target", "{target}", "--out", "{folder}/x", "--max-length", "1"),
            "wanted 2",
        ),
        (
            ("prepare", "{cut}", "--target", "{target}", "--out", "{folder}/x"),
            "cut.json:1 (record 2): JSON cut off",
        ),
        (
            ("prepare", "{none}", "--target", "{target}", "--out", "{folder}/x"),
            "no row is left of 1 conversation ",
        ),
    ],
)
def test_errors_are_one_line_and_exit_2(
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    tiny_target_dir: Path,
    chats: Path,
    arguments: tuple[str, ...],
    told: str,
) -> None:
    (tmp_path / "cut.json").write_text(chats.read_text()[:-3])
    (tmp_path / "none.json").write_text('[{"conversations": []}]')
    eagle(capsys, "prepare", chats, "--target", tiny_target_dir, "--out", tmp_path / "rows")
    names = {
        "rows": tmp_path / "rows",
        "folder": tmp_path,
        "target": tiny_target_dir,
        "chats": chats,
        "cut": tmp_path / "cut.json",
        "none": tmp_path / "none.json",
    }
    code, _, err = eagle(capsys, *(argument.format(**names) for argument in arguments))
    assert code == 2
    last = err.strip().splitlines()[-1]
    assert last.startswith("error: ")
    assert told in last
    assert "Traceback" not in err
    assert not (tmp_path / "x").exists()


def test_skip_bad_keeps_the_good_and_names_the_bad(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, tiny_target_dir: Path, chats: Path
) -> None:
    cut = tmp_path / "cut.json"
    cut.write_text(chats.read_text()[:-3])
    code, out, _ = eagle(
        capsys, "prepare", cut, "--target", tiny_target_dir, "--out", tmp_path / "rows", "--skip-bad"
    )
    assert code == 0
    assert "damaged records: 1" in out
    assert f"damaged  {cut}:1 (record 2): JSON cut off in the middle" in out


def test_what_was_asked_for_is_said(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, tiny_target_dir: Path
) -> None:
    one, two = {"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}
    for name in ("half.jsonl", "rest.jsonl"):
        (tmp_path / name).write_text(
            "".join(json.dumps({"messages": [one, two, one, two]}) + "\n" for _ in "abcd")
        )
    out = tmp_path / "rows"
    command = ("prepare", f"{tmp_path}/half.jsonl=0.5", tmp_path / "rest.jsonl", "--target", tiny_target_dir)
    more = ("--last-turn-only", "--drop-duplicates", "--template-arg", "enable_thinking=false", "--out", out)
    code, said, _ = eagle(capsys, *command, *more)
    assert code == 0
    taken = 4 + 4 - int(said.split(" records left out")[0].split()[-1])
    assert taken in (5, 6, 7)
    assert f"{taken - 1:>8,}  rows equal an earlier one (dropped)" in said
    assert "records left out and 0 taken again, by their source's weight" in said
    assert "note: only the last answer of each conversation is supervised" in said
    code, said, _ = eagle(capsys, "inspect", out, "--row", "0", "--json")
    shown = json.loads(said)
    assert [part["text"] for part in shown["row"]["segments"] if part["supervised"]] == ["Hello<|im_end|>"]
    settings = {
        name: shown["rows"][name] for name in ("last_turn_only", "drop_duplicates", "template_arguments")
    }
    assert settings == {
        "last_turn_only": True,
        "drop_duplicates": True,
        "template_arguments": {"enable_thinking": False},
    }
