"""A target with torchao's int8 weights, on a CPU: features, labels, training and decoding are its own."""

from __future__ import annotations

import importlib.util
import json
import shutil
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import torch

from eagle_train.decoding.drafters import HeadDrafter
from eagle_train.decoding.loop import Settings, generate, plain
from eagle_train.decoding.shapes import Chain, Dynamic
from eagle_train.errors import UserError
from eagle_train.export.export import export
from eagle_train.heads.disk import load_head
from eagle_train.io.tensors import load_tensors, save_tensors
from eagle_train.shards.frozen_target import FrozenTarget
from eagle_train.shards.plan import label_positions
from eagle_train.shards.reader import open_shards
from eagle_train.targets.capture import FeatureTap
from eagle_train.targets.checkpoint import dense, dense_output, load_config, quantisation, skeleton
from eagle_train.targets.labels import labels
from eagle_train.targets.load import Target, load_target
from eagle_train.targets.stored import weights_bytes

from .conftest import PROMPT, Trained, train_on
from .models import LAYERS, family_config, random_model, save_target
from .scripted import Scripted

quantization = pytest.importorskip("torchao.quantization", reason="torchao is not installed")


@pytest.fixture(scope="module", params=["llama3", "gemma2", "phi3"])
def made(request, tmp_path_factory, tiny_target_dir: Path, few_conversations: Path) -> Trained:
    """A head trained on a quantised target; its output map is quantised too, save for tied ones."""
    from transformers import TorchAoConfig

    folder = tmp_path_factory.mktemp(request.param)
    config = family_config(request.param)
    int8 = TorchAoConfig(
        quantization.Int8WeightOnlyConfig(version=2),
        include_input_output_embeddings=not config.tie_word_embeddings,
    )
    target = save_target(folder / "target", config, tiny_target_dir, int8)
    return train_on(target, few_conversations, folder)


def is_quantised(weight: torch.Tensor) -> bool:
    return type(weight).__module__.startswith("torchao")


@torch.inference_mode()
def test_features_and_labels_are_those_of_the_quantised_weights(made: Trained):
    target, shards = made.target, open_shards(made.shards)
    assert is_quantised(target.layers[3].self_attn.o_proj.weight)
    whole = load_target(Path(target.name) / "whole", dtype="fp32", device="cpu")
    row = shards.read(0)
    ids = row.input_ids[None]
    own = target.model(input_ids=ids, output_hidden_states=True, use_cache=False)
    wanted = torch.cat([own.hidden_states[k][0] for k in (2, LAYERS // 2, LAYERS - 3)], dim=-1)
    torch.testing.assert_close(row.aux, wanted, rtol=1e-4, atol=1e-4)
    logits = own.logits[0, label_positions(row.spans)]
    assert torch.equal(row.label_argmax, logits.argmax(-1))
    torch.testing.assert_close(row.label_lse, logits.logsumexp(-1), rtol=1e-5, atol=1e-5)
    other = whole.model(input_ids=ids, output_hidden_states=True, use_cache=False)
    assert (other.hidden_states[5] - own.hidden_states[5]).abs().max() > 1e-3


@torch.inference_mode()
def test_the_frozen_target_is_dense_and_gives_the_quantised_models_logits(made: Trained):
    frozen = FrozenTarget.load(made.shards)
    own = made.target.model(input_ids=torch.tensor([PROMPT]), output_hidden_states=True, use_cache=False)
    assert not is_quantised(frozen.lm_head)
    torch.testing.assert_close(frozen.logits(own.hidden_states[-1]), own.logits, rtol=1e-4, atol=1e-5)
    assert is_quantised(made.target.lm_head.weight) is (made.target.config.model_type == "phi3")


def test_the_fingerprint_tells_the_quantised_target_from_the_whole_one(made: Trained):
    whole = load_target(Path(made.target.name) / "whole", dtype="fp32", device="cpu")
    again = load_target(made.target.name, dtype="fp32", device="cpu")
    assert made.target.fingerprint == again.fingerprint != whole.fingerprint


def held(model: torch.nn.Module) -> int:
    """Return the bytes of a model's parameters, the parts of quantised ones one by one."""
    size = 0
    for weight in model.parameters():
        parts = [getattr(weight, name) for name in getattr(weight, "tensor_data_names", ())]
        parts += [getattr(weight, name, None) for name in getattr(weight, "optional_tensor_data_names", ())]
        size += sum(part.numel() * part.element_size() for part in parts or [weight] if part is not None)
    return size


def planned(folder: str | Path) -> int:
    config = load_config(str(folder), False)
    return weights_bytes(str(folder), config, skeleton(config, False), torch.float32)


def test_memory_is_planned_as_the_weights_are_stored(made: Trained):
    whole = load_target(Path(made.target.name) / "whole", dtype="fp32", device="cpu")
    assert planned(made.target.name) == held(made.target.model) < 0.7 * held(whole.model)
    assert planned(whole.name) == held(whole.model)
    assert quantisation(made.target.model.config) == "torchao"


def test_trees_are_read_as_the_text_alone(made: Trained):
    settings = Settings(max_new_tokens=22, eos_ids=())
    wanted = plain(made.target, PROMPT, settings).ids
    got = generate(made.target, Scripted([*PROMPT, *wanted], (2, 5)), PROMPT, settings)
    assert got.ids == wanted
    assert max(got.accepted) == 3


@pytest.mark.parametrize("shape", [Chain(3), Dynamic(20, 4, 4)], ids=["chain", "tree"])
def test_a_trained_head_decodes_as_the_quantised_target_alone(made: Trained, shape, tmp_path: Path):
    settings = Settings(max_new_tokens=10, eos_ids=())
    export(made.run, tmp_path / "head", engine="vllm", dtype="keep")
    drafter = HeadDrafter(load_head(tmp_path / "head"), made.target, shape)
    assert generate(made.target, drafter, PROMPT, settings).ids == plain(made.target, PROMPT, settings).ids


class Packed(torch.nn.Module):
    """A Linear as GPTQ and AWQ leave it: integers and scales in buffers, no weight."""

    def __init__(self, linear: torch.nn.Linear) -> None:
        super().__init__()
        scales = linear.weight.detach().abs().amax(1, keepdim=True) / 7
        self.register_buffer("qweight", (linear.weight.detach() / scales).round().to(torch.int32))
        self.register_buffer("scales", scales)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.linear(x, self.qweight.to(x.dtype) * self.scales)


def packed_target(pack_head: bool = False) -> Target:
    model = random_model(family_config("llama3", tie_word_embeddings=False))
    for module in [m for layer in model.model.layers for m in (layer.self_attn, layer.mlp)]:
        for name, child in list(module.named_children()):
            if isinstance(child, torch.nn.Linear):
                setattr(module, name, Packed(child))
    if pack_head:
        model.lm_head = Packed(model.lm_head)
    model.config.quantization_config = {"quant_method": "gptq"}
    return Target("packed", None, model)


@torch.inference_mode()
def test_layers_without_a_weight_are_tapped_fingerprinted_and_decoded():
    target = packed_target()
    own = target.model(input_ids=torch.tensor([PROMPT]), output_hidden_states=True, use_cache=False)
    with FeatureTap(target, (2, 4, 5)) as tap:
        seen = tap.forward(torch.tensor([PROMPT]))
    assert torch.equal(seen.aux, torch.cat([own.hidden_states[k] for k in (2, 4, 5)], dim=-1))
    argmax, lse = labels(target, seen.last[0])
    assert torch.equal(argmax, own.logits[0].argmax(-1))
    assert torch.allclose(lse, own.logits[0].logsumexp(-1), atol=1e-5)
    settings = Settings(max_new_tokens=12, eos_ids=())
    wanted = plain(target, PROMPT, settings).ids
    assert generate(target, Scripted([*PROMPT, *wanted], (2, 5)), PROMPT, settings).ids == wanted
    before = target.fingerprint
    other = packed_target()
    assert other.fingerprint == before
    again = packed_target()
    again.model.model.layers[5].mlp.up_proj.qweight += 1
    assert again.fingerprint != before
    with pytest.raises(UserError, match=r"packed: its lm_head is packed \(Packed, without a weight\)"):
        packed_target(pack_head=True).frozen()


class Bytes(torch.nn.Parameter):
    """A weight in bytes of its own kind that does not say how it is read, as bitsandbytes has them."""


def test_weights_of_a_kind_that_says_nothing_count_as_they_are_packed():
    weight = Bytes(torch.arange(6, dtype=torch.uint8), requires_grad=False)
    assert torch.equal(dense(weight), torch.arange(6, dtype=torch.uint8))
    assert type(dense(weight)) is torch.Tensor
    with pytest.raises(
        UserError, match="T: its lm_head is packed as uint8, wanted numbers; use a checkpoint"
    ):
        dense_output(weight, "T", "lm_head")


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


def marked(source: Path, folder: Path, quantisation: dict | str) -> Path:
    """Copy a target and let its config say that it is quantised."""
    shutil.copytree(source, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": quantisation}))
    return folder


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
    with pytest.raises(UserError, match="could not be loaded as a causal"):
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
    with pytest.raises(UserError, match="could not be loaded as a causal language model") as caught:
        load_target(folder, device="cpu")
    assert "\n" not in str(caught.value)
