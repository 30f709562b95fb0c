"""A target's generation_config.json: what it says is read, what is cut or wrong is named in one line."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from eagle_train.errors import UserError
from eagle_train.targets.load import load_target

Given = Callable[[str], str]


@pytest.fixture(params=["folder", "hub"])
def given(
    request: pytest.FixtureRequest, tiny_target_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Given:
    """Return the name of the tiny target, in a folder or on the hub, with this generation_config.json."""

    def write(text: str) -> str:
        if request.param == "folder":
            name, folder = str(tmp_path / "t"), tmp_path / "t"
        else:  # as the hub's own library caches it
            name, commit = "owner/name", "0" * 40
            place = tmp_path / "cache" / "models--owner--name"
            folder = place / "snapshots" / commit
            (place / "refs").mkdir(parents=True)
            (place / "refs" / "main").write_text(commit)
            monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
            monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
        shutil.copytree(tiny_target_dir, folder)
        (folder / "generation_config.json").write_text(text)
        return name

    return write


def test_several_end_tokens_are_all_kept(tiny_target_dir: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(tiny_target_dir, tmp_path / "t"))
    file = folder / "generation_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "eos_token_id": [9, 0]}))
    assert load_target(folder, device="cpu").eos_ids == (9, 0, 2)


@pytest.mark.parametrize("value", ["x", -1, [2, "x"], 2.5])
def test_an_end_token_that_is_no_id_is_refused(tiny_target_dir: Path, tmp_path: Path, value: object) -> None:
    folder = Path(shutil.copytree(tiny_target_dir, tmp_path / "t"))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": value}))
    words = f"{folder}: generation_config.json: eos_token_id: got {value!r}, wanted a token id"
    with pytest.raises(UserError, match=f"^{re.escape(words)}"):
        _ = load_target(folder, device="cpu").eos_ids


@pytest.mark.parametrize(
    ("text", "words"),
    [('{"repetition_penalty": 1.', "cannot be read"), ("", "cannot be read"), ("[1]", "got a list")],
)
def test_a_file_that_is_no_json_object_is_refused(given: Given, text: str, words: str) -> None:
    name = given(text)
    with pytest.raises(UserError, match=f"^{re.escape(name)}: generation_config.json: {words}"):
        load_target(name, device="cpu")


@pytest.mark.parametrize(
    ("key", "value", "wanted"),
    [
        ("max_new_tokens", "a", "a whole number above 0"),
        ("max_new_tokens", -3, "a whole number above 0"),
        ("pad_token_id", "x", "a token id, 0 or more"),
        ("early_stopping", "q", "what transformers takes (`early_stopping` must be "),
        ("watermarking_config", 3, "what transformers takes ("),
    ],
)
def test_a_value_without_which_no_target_loads_is_named(
    given: Given, key: str, value: Any, wanted: str
) -> None:
    name = given(json.dumps({"eos_token_id": 2, key: value}))
    with pytest.raises(UserError) as caught:
        load_target(name, device="cpu")
    text = str(caught.value)
    assert text.startswith(f"{name}: generation_config.json: {key}: got {value!r}, wanted {wanted}")
    assert text.endswith("; mend the file, or take the key out")


def test_a_target_without_the_file_loads(given: Given, tmp_path: Path) -> None:
    name = given("{}")
    for file in tmp_path.rglob("generation_config.json"):
        file.unlink()
    assert load_target(name, device="cpu").own_settings == {}


@pytest.mark.parametrize("other", [{"do_sample": True}, {"num_beams": 3}])
def test_a_value_that_another_allows_is_taken(tiny_target_dir: Path, tmp_path: Path, other: Any) -> None:
    folder = Path(shutil.copytree(tiny_target_dir, tmp_path / "t"))
    file = folder / "generation_config.json"
    file.write_text(json.dumps({"num_return_sequences": 3, **other}))
    assert load_target(folder, device="cpu").own_settings == {}
    file.write_text(json.dumps({"num_return_sequences": 3, **other, "max_new_tokens": 0}))
    with pytest.raises(UserError, match="max_new_tokens: got 0, wanted a whole number above 0"):
        load_target(folder, device="cpu")
    file.write_text(json.dumps({"max_new_tokens": 8, "num_return_sequences": 3}))
    with pytest.raises(UserError, match="num_return_sequences: got 3, wanted what transformers takes"):
        load_target(folder, device="cpu")
