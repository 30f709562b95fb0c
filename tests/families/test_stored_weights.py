"""Memory is planned as quantised weights are stored, which their files' headers say."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import torch

from eagle_train.errors import UserError
from eagle_train.io.tensors import load_tensors, save_tensors
from eagle_train.targets.checkpoint import load_config, skeleton
from eagle_train.targets.load import load_target
from eagle_train.targets.stored import weights_bytes

from .quantised import held, marked, planned


@pytest.mark.parametrize("num_files", [1, 2])
def test_memory_of_packed_weights_is_read_from_the_headers(tmp_path: Path, tiny_target_dir: Path, num_files):
    """Int32 words of eight weights, a half-precision scale for each row; all else counts in float32."""
    packing = {"quant_method": "gptq", "bits": 4, "group_size": 32}
    folder = marked(tiny_target_dir, tmp_path / "t", packing)
    tensors, saved = load_tensors(folder / "model.safetensors")[0], 0
    for name in [name for name in tensors if name.endswith("up_proj.weight")]:
        rows, columns = tensors.pop(name).shape
        stem = name.removesuffix("weight")
        tensors[f"{stem}qweight"] = torch.zeros(columns // 8, rows, dtype=torch.int32)
        tensors[f"{stem}scales"] = torch.zeros(1, rows, dtype=torch.float16)
        saved += rows * columns * 4 - rows * columns // 2 - 2 * rows
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].half()  # tied: loaded once
    assert saved > 0
    (folder / "model.safetensors").unlink()
    names = [f"model-{number}.safetensors" for number in range(num_files)]
    for number, file in enumerate(names):
        save_tensors(folder / file, dict(list(tensors.items())[number::num_files]), {"format": "pt"})
    index = {name: names[number % num_files] for number, name in enumerate(tensors)}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    assert planned(folder) == planned(tiny_target_dir) - saved
    (folder / names[-1]).write_bytes(bytes(range(1, 99)))
    with pytest.raises(UserError, match=r"a weight file is damaged .*no header"):
        planned(folder)
    (folder / names[-1]).unlink()
    assert planned(folder) == planned(tiny_target_dir)


@pytest.mark.usefixtures("no_hub")
def test_headers_on_the_hub_are_read_where_the_files_are_not_here(
    tmp_path: Path, tiny_target_dir: Path, monkeypatch: pytest.MonkeyPatch
):
    """As the hub's own library gives them; where it gives none, the weights count as not quantised."""
    folder = marked(tiny_target_dir, tmp_path / "t", {"quant_method": "gptq", "bits": 8, "group_size": 32})
    tensors = load_tensors(folder / "model.safetensors")[0]
    packed = tensors.pop("model.layers.3.mlp.up_proj.weight").to(torch.int8)
    save_tensors(folder / "model.safetensors", {**tensors, "packed": packed}, {"format": "pt"})
    config = load_config(str(folder), False)

    def answered(name: str, revision: str | None) -> Any:
        return huggingface_hub.get_local_safetensors_metadata(folder)

    def silent(name: str, revision: str | None) -> Any:
        raise ConnectionError("no network")

    for hub, wanted in ((answered, planned(folder)), (silent, planned(tiny_target_dir))):
        monkeypatch.setattr(huggingface_hub, "get_safetensors_metadata", hub)
        assert weights_bytes("owner/name", config, skeleton(config, False), torch.float32) == wanted
    assert planned(tiny_target_dir) - planned(folder) == 3 * packed.numel()


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU may compute in fp8")
def test_fp8_weights_that_are_unpacked_on_a_cpu_count_as_they_are_then(tmp_path: Path, tiny_target_dir: Path):
    blocks = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [32, 32]}
    folder = marked(tiny_target_dir, tmp_path / "t", blocks)
    tensors = load_tensors(folder / "model.safetensors")[0]
    for name in [name for name in tensors if name.endswith("o_proj.weight")]:
        scale = tensors[name].abs().max().reshape(1, 1) / 448
        tensors |= {name: (tensors[name] / scale).to(torch.float8_e4m3fn), f"{name}_scale_inv": scale}
    save_tensors(folder / "model.safetensors", tensors, {"format": "pt"})
    target = load_target(folder, dtype="fp32", device="cpu")
    weight = target.layers[0].self_attn.o_proj.weight
    exact = load_target(tiny_target_dir, dtype="fp32", device="cpu").layers[0].self_attn.o_proj.weight
    assert 0 < (weight - exact).abs().max() < 0.05 * exact.abs().max()
    assert planned(folder) == held(target.model) == planned(tiny_target_dir)
