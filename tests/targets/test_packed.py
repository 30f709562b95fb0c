"""Weights that are packed though the config says nothing of it: refused by all that read the target."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from eagle_train.errors import UserError
from eagle_train.estimate import estimate
from eagle_train.io.tensors import load_tensors, save_tensors
from eagle_train.recipe_files import load_recipe
from eagle_train.targets.load import load_target

_UP = "model.layers.3.mlp.up_proj.weight"
_FP8 = torch.float8_e4m3fn
Read = Callable[[Path], object]


@pytest.fixture(params=["load", "plan"])
def read(request: pytest.FixtureRequest, tiny_rows_dir: Path) -> Read:
    """Read a target as everything that runs it does, or as plan does, which loads no weights."""
    if request.param == "load":
        return lambda folder: load_target(folder, device="cpu")
    recipe = load_recipe("eagle3-tiny")
    return lambda folder: estimate(tiny_rows_dir, str(folder), recipe, device="cpu", seconds=0)


def _with_tensor(source: Path, folder: Path, name: str, dtype: torch.dtype, says: str | None) -> Path:
    """Copy a target with one tensor, its own or a new one, in another dtype; `says` is its config's dtype."""
    shutil.copytree(source, folder)
    tensors, metadata = load_tensors(folder / "model.safetensors")
    own = tensors.pop(f"model.{name}", tensors.get(name, torch.ones(1)))  # a body's file has shorter names
    tensors[name] = own.to(dtype)
    save_tensors(folder / "model.safetensors", tensors, metadata)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "dtype": says or config["dtype"]}))
    return folder


@pytest.mark.parametrize(
    ("name", "dtype", "words"),
    [
        (_UP, torch.int8, f"{_UP} holds I8, but config.json has no quantization_config"),
        (f"{_UP}_scale", torch.float32, f"{_UP}_scale belongs to a packed weight, but"),
        (f"{_UP}_scale_inv", torch.float32, f"{_UP}_scale_inv belongs to a packed weight, but"),
        (_UP.replace("weight", "scale_weight"), torch.float32, "up_proj.scale_weight belongs to a packed"),
        ("model.layers.3.mlp.up_proj.qzeros", torch.int32, "up_proj.qzeros belongs to a packed weight, but"),
        (_UP, _FP8, f"{_UP} holds F8_E4M3, but config.json has neither a quantization_config"),
        (_UP.removeprefix("model."), _FP8, "layers.3.mlp.up_proj.weight holds F8_E4M3, but"),
    ],
)
def test_packed_weights_of_which_the_config_says_nothing_are_refused(
    read: Read, tiny_target_dir: Path, tmp_path: Path, name: str, dtype: torch.dtype, words: str
) -> None:
    folder = _with_tensor(tiny_target_dir, tmp_path / "t", name, dtype, None)
    with pytest.raises(UserError) as caught:
        read(folder)
    assert str(caught.value).startswith(f"{folder}: ")
    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("name", "dtype"),
    [("vision.logit_scale", torch.float32), ("model.layers.3.self_attn.position_ids", torch.int64)],
)
def test_other_tensors_that_the_model_has_no_place_for_are_left_alone(
    read: Read, tiny_target_dir: Path, tmp_path: Path, name: str, dtype: torch.dtype
) -> None:
    read(_with_tensor(tiny_target_dir, tmp_path / "t", name, dtype, None))


def test_fp8_numbers_are_the_weights_where_the_config_names_that_dtype(
    read: Read, tiny_target_dir: Path, tmp_path: Path
) -> None:
    """So transformers itself saves a model that was cast to fp8: without scales, read back by a cast."""
    folder = _with_tensor(tiny_target_dir, tmp_path / "t", _UP, _FP8, "float8_e4m3fn")
    read(folder)
    wanted = load_tensors(tiny_target_dir / "model.safetensors")[0][_UP].to(_FP8).float()
    assert torch.equal(load_target(folder, device="cpu").layers[3].mlp.up_proj.weight, wanted)
