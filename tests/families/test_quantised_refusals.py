"""A quantisation that cannot be read is refused in one line."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import torch

from eagle_train.errors import UserError
from eagle_train.io.tensors import load_tensors, save_tensors
from eagle_train.targets.load import load_target

from .quantised import marked


@pytest.mark.parametrize(
    ("package", "quantisation"),
    [
        ("optimum", {"quant_method": "gptq", "bits": 4, "group_size": 32}),
        ("gptqmodel", {"quant_method": "awq", "bits": 4, "group_size": 32}),
        ("bitsandbytes", {"quant_method": "bitsandbytes", "load_in_4bit": True}),
        ("bitsandbytes", {"quant_method": "bitsandbytes", "load_in_8bit": True}),
        ("compressed-tensors", {"quant_method": "compressed-tensors", "format": "float-quantized"}),
        ("optimum-quanto", {"quant_method": "quanto", "weights": "int8"}),
    ],
)
def test_a_missing_library_is_named_in_one_line(tmp_path: Path, tiny_target_dir: Path, package, quantisation):
    if importlib.util.find_spec(package.replace("-", "_")):
        pytest.skip(f"{package} is installed")
    with pytest.raises(UserError, match=f"could not be loaded as a causal .*{package}") as caught:
        load_target(marked(tiny_target_dir, tmp_path / "t", quantisation), device="cpu")
    assert "\n" not in str(caught.value)


def test_a_quantisation_that_nobody_knows_is_refused(tmp_path: Path, tiny_target_dir: Path):
    """Loaded, its integers would be taken for weights, and their scales left out."""
    folder = marked(tiny_target_dir, tmp_path / "t", {"quant_method": "zip"})
    tensors = load_tensors(folder / "model.safetensors")[0]
    for name in [name for name in tensors if name.endswith("up_proj.weight")]:
        scale = tensors[name].abs().max() / 127
        tensors |= {name: (tensors[name] / scale).round().to(torch.int8), f"{name}_scale": scale.reshape(1)}
    save_tensors(folder / "model.safetensors", tensors, {"format": "pt"})
    with pytest.raises(UserError, match="quantised by zip, which the installed transformers does not know"):
        load_target(folder, device="cpu")


@pytest.mark.parametrize("settings", [{"quant_method": "torchao", "quant_type": "int8"}, {"bits": 4}, "int4"])
def test_settings_of_a_quantisation_that_make_no_sense_are_one_line(
    tmp_path: Path, tiny_target_dir: Path, settings
):
    folder = marked(tiny_target_dir, tmp_path / "t", settings)
    words = "could not be loaded as a causal language model|config.json: quantization_config: got 'int4'"
    with pytest.raises(UserError, match=words) as caught:
        load_target(folder, device="cpu")
    assert "\n" not in str(caught.value)
