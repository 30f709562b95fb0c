"""The manifest: what it says, and that an edited one is named in one line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from eagle_train.errors import UserError
from eagle_train.io.tensors import load_tensors, save_tensors
from eagle_train.shards.reader import open_shards
from eagle_train.shards.schema import LAYER_CONVENTION

from .conftest import edit


def _put(file: Path, path: list[str | int], value: Any) -> None:
    """Set one field of a record, or with KeyError take it away."""

    def change(place: Any) -> None:
        for key in path[:-1]:
            place = place[key]
        if value is KeyError:
            del place[path[-1]]
        else:
            place[path[-1]] = value

    edit(file, change)


def test_it_says_what_a_layer_number_means(tiny_shards_dir: Path) -> None:
    info = json.loads((tiny_shards_dir / "shards.json").read_text())
    assert info["layer_convention"] == LAYER_CONVENTION
    assert info["layer_convention"] == "k = the residual stream entering layer k, hidden_states[k]"


@pytest.mark.parametrize(
    ("path", "value", "words"),
    [
        (["features"], KeyError, "lacks features"),
        (["codec"], "zip", 'codec: got "zip", wanted one of bf16, fp32, fp8, int8'),
        (["features"], "eagle4", 'features: got "eagle4", wanted one of eagle3'),
        (["hidden_size"], "32", 'hidden_size: got "32", wanted a whole number'),
        (["layer_ids"], 2, "layer_ids: got 2, wanted a list"),
        (["shards"], {}, "shards: got {}, wanted a list"),
        (["shards", 1], 5, "shards[1]: got 5, wanted an object"),
        (["shards", 1, "bytes"], None, "shards[1].bytes: got null, wanted a whole number"),
        (["shards", 1, "file"], KeyError, "lacks shards[1].file"),
        (["target"], "tiny", 'target: got "tiny", wanted an object'),
        (["layer_convention"], "output of layer k", 'layer_convention: got "output of layer k", wanted'),
        (["hidden_size"], -1, "hidden_size: got -1, wanted a whole number from 1"),
        (["layer_ids"], ["a"], 'layer_ids: got ["a"], wanted a list of whole numbers'),
        (["layer_ids"], [2, 4, 9], "layer_ids: got [2, 4, 9], wanted layers of features eagle3, of 8"),
        (["layer_ids"], [], "layer_ids: got [], wanted layers of features eagle3"),
        (["target"], {}, "lacks target.name"),
        (["target", "fingerprint"], [], "target.fingerprint: got [], wanted a text"),
        (["plan"], "", 'plan: got "", wanted 16 hex digits'),
        (["shards", 1, "plan"], 7, "shards[1].plan: got 7, wanted 16 hex digits"),
        (["shards", 0, "file"], "../x/shard-00000.safetensors", "shards[0].file: got"),
        (["shards", 0, "file"], "/etc/passwd", "shards[0].file: got"),
        (["shards", 0, "file"], "shard-0.safetensors", "shards[0].file: got"),
        (["shards", 0, "file"], "shard-000000.safetensors", "shards[0].file: got"),
        (["shards", 0, "file"], "shard-0000\u0661.safetensors", "shards[0].file: got"),
        (["shards", 0, "file"], "shard-00001.safetensors", "wanted every file once"),
        (["skipped"], [3], "skipped[0]: got 3, wanted an object"),
        (["supervised_frequencies"], {"a": 1}, 'supervised_frequencies: got "a", wanted ids'),
        (["supervised_frequencies"], {"99999": 1}, 'supervised_frequencies: got "99999", wanted ids'),
        (["rows_fingerprint"], [], "rows_fingerprint: got [], wanted a text"),
        (["num_rows"], 23, "num_rows: got 23, wanted 24, the sum of its shards"),
        (["shards"], [], "num_rows: got 24, wanted 0"),
        (["target", "name"], "\ud800", "holds half a character"),
        (["assembled"], 1, "assembled: got 1, wanted true or false"),
    ],
)
def test_an_edited_manifest_is_named_in_one_line(
    copied: Path, path: list[str | int], value: Any, words: str
) -> None:
    _put(copied / "shards.json", path, value)
    with pytest.raises(UserError) as caught:
        open_shards(copied)
    assert words in str(caught.value)
    assert str(caught.value).endswith("run the same eagle extract again")


def test_counts_of_tokens_that_are_none_are_named(copied: Path) -> None:
    _put(copied / "shards.json", ["supervised_frequencies", "5"], "many")
    with pytest.raises(UserError, match=r"shards\.json: supervised_frequencies.*many"):
        print(open_shards(copied).supervised_frequencies)


@pytest.mark.parametrize(
    ("path", "value", "words"),
    [
        (["tied"], "yes", "tied: got 'yes', wanted true or false"),
        (["logit_scale"], None, "logit_scale: got None, wanted a number"),
        (["config"], KeyError, "config: got 'nothing', wanted an object"),
        (["target", "fingerprint"], "0123", "of target weights 0123, the features are of"),
    ],
)
def test_an_edited_target_record_is_named_in_one_line(
    copied: Path, path: list[str | int], value: Any, words: str
) -> None:
    _put(copied / "target.json", path, value)
    with pytest.raises(UserError) as caught:
        open_shards(copied).frozen_target()
    assert str(caught.value).startswith(f"{copied / 'target.json'}: ")
    assert words in str(caught.value)


def test_weights_of_another_target_of_the_same_shape_are_recognised(copied: Path) -> None:
    tensors, _ = load_tensors(copied / "target.safetensors")
    tensors["embedding"][7, 3] += 1
    save_tensors(copied / "target.safetensors", tensors)
    with pytest.raises(UserError, match=r"target\.safetensors: not the file that shards\.json lists"):
        open_shards(copied).frozen_target()
