"""An edited index is named in one line, whether or not the manifest lists it as it is."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from eagle_train.errors import UserError
from eagle_train.io.checksums import sha256_file
from eagle_train.io.tensors import load_tensors, save_tensors
from eagle_train.shards import upkeep
from eagle_train.shards.reader import open_shards

from .conftest import edit

Index = dict[str, Tensor]


def _put(name: str, place: Any, value: int) -> Callable[[Index], None]:
    return lambda index: index[name].__setitem__(place, value)


def _set(name: str, change: Callable[[Tensor], Tensor]) -> Callable[[Index], None]:
    return lambda index: index.update({name: change(index[name])})


def _texts(name: str, text: str) -> Callable[[Index], None]:
    return lambda index: index.update({name: torch.tensor(list(text.encode()), dtype=torch.uint8)})


def _edit(folder: Path, change: Callable[[Index], None]) -> None:
    """Let `change` change the index, and the manifest list it."""
    index, _ = load_tensors(folder / "index.safetensors")
    change(index)
    save_tensors(folder / "index.safetensors", index)
    digest = sha256_file(folder / "index.safetensors")
    edit(folder / "shards.json", lambda info: info.update(index_checksum=digest))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (_put("shard", 0, 99), "shard: wanted numbers below"),
        (_put("shard", 0, -1), "shard: wanted numbers below"),
        (_put("slot", 0, 999), "slot: wanted places below the rows"),
        (_put("slot", slice(None), 0), "slot: wanted every place of a shard once"),
        (_set("slot", Tensor.float), "slot: wanted int64 of 1 dimensions"),
        (_put("spans", (0, 1), 10**6), "spans: wanted each inside its row"),
        (_put("spans", (0, 0), 0), "spans: wanted each inside its row"),
        (_set("spans", lambda spans: spans.view(-1, 1)), "span_starts: wanted one start a row"),
        (_put("span_starts", 1, 10**6), "span_starts: wanted one start a row"),
        (_put("lengths", 0, 7), "lengths: wanted the tokens of each shard"),
        (_set("lengths", lambda lengths: lengths[:-1]), "lengths: wanted 24 rows"),
        (lambda index: index.pop("slot"), "slot: wanted it there"),
        (lambda index: index.pop("row_ids"), "row_ids: wanted it there"),
        (_texts("row_ids", json.dumps(["r"] * 23)), "row_ids: wanted a JSON list of 24 texts"),
        (_texts("categories", '["a"]'), "categories: wanted a JSON list of 24 texts"),
        (_texts("categories", "{bad"), "categories: wanted a JSON list of 24 texts"),
        (_texts("categories", json.dumps([3] * 24)), "categories: wanted a JSON list of 24 texts"),
        (_texts("categories", json.dumps(["\ud800"] * 24)), "categories: wanted a JSON list of 24 texts"),
    ],
)
def test_an_index_that_cannot_be_is_refused(
    copied: Path, change: Callable[[Index], None], words: str
) -> None:
    _edit(copied, change)
    with pytest.raises(UserError) as caught:
        open_shards(copied)
    assert str(caught.value).startswith(f"{copied / 'index.safetensors'}: {words}")
    assert str(caught.value).endswith("; run the same eagle extract again")
    assert str(caught.value) in upkeep.verify(copied, show=False)["faults"]


def _exchange_slots(index: Index) -> None:
    """Of two rows in one shard."""
    one, two = (index["shard"] == 0).nonzero().flatten()[:2].tolist()
    index["slot"][[one, two]] = index["slot"][[two, one]]


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("slot", _exchange_slots),
        ("spans", _put("spans", (0, 0), 1)),
        ("conversation_ids", _texts("conversation_ids", json.dumps(["c"] * 24))),
        ("categories", _texts("categories", json.dumps(["a"] * 24))),
        ("rows", lambda index: index.pop("rows")),
    ],
)
def test_an_index_that_might_be_is_compared_with_the_shards(
    copied: Path, name: str, change: Callable[[Index], None]
) -> None:
    assert not upkeep.verify(copied, show=False)["faults"]
    _edit(copied, change)
    (fault,) = upkeep.verify(copied, show=False)["faults"]
    assert fault.startswith(f"{copied / 'index.safetensors'}: {name}: not what the shards hold; run the same")


def test_a_row_that_its_shard_holds_otherwise_is_not_read(copied: Path) -> None:
    _edit(copied, _put("spans", (0, 0), 1))
    shards = open_shards(copied)
    with pytest.raises(
        UserError, match=r"index\.safetensors: row 0: not the length and spans that its shard"
    ):
        shards.read(0)
