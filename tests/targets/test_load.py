"""Loading: every checkpoint form gives the same model, and what is missing or damaged is named."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from eagle_train.data.tokenizer import load_tokenizer
from eagle_train.errors import UserError
from eagle_train.io.tensors import load_tensors, save_tensors
from eagle_train.targets import checkpoint
from eagle_train.targets.load import dtype_name, load_target, parse_dtype, pick_device

_IDS = torch.tensor([[5, 60, 7, 200, 9]])


def _logits(folder: Path, **arguments: object) -> torch.Tensor:
    target = load_target(folder, device="cpu", **arguments)  # type: ignore[arg-type]
    with torch.no_grad():
        return target.logits(target.run_body(_IDS))


def test_what_a_target_says_of_itself(tiny_target_dir: Path) -> None:
    target = load_target(tiny_target_dir, device="cpu")
    assert (target.num_layers, target.hidden_size, target.vocab_size) == (8, 32, 300)
    assert target.dtype == torch.float32
    assert target.device == torch.device("cpu")
    assert target.eos_ids == (2,)
    assert target.tokenizer.eos_token == "<|im_end|>"
    assert target.frozen().tied
    assert not target.model.training
    assert not any(parameter.requires_grad for parameter in target.model.parameters())


@pytest.mark.parametrize("tied", [True, False])
def test_sharded_and_single_file_checkpoints_are_one_model(
    make_tiny_target,
    tmp_path: Path,
    tied: bool,
) -> None:
    single = make_tiny_target(tmp_path / "single", tied=tied)
    AutoModelForCausalLM.from_pretrained(single).save_pretrained(tmp_path / "cut", max_shard_size="60KB")
    assert (tmp_path / "cut" / "model.safetensors.index.json").is_file()
    assert ("lm_head.weight" in load_tensors(single / "model.safetensors")[0]) is not tied
    assert torch.equal(_logits(single), _logits(tmp_path / "cut"))
    fingerprints = {load_target(tmp_path / name, device="cpu").fingerprint for name in ("single", "cut")}
    assert len(fingerprints) == 1
    assert load_target(single, device="cpu").frozen().tied is tied


def test_the_fingerprint_sees_weights_and_rope_but_not_the_dtype(
    make_tiny_target,
    tiny_target_dir: Path,
    tmp_path: Path,
) -> None:
    own = load_target(tiny_target_dir, device="cpu").fingerprint
    assert load_target(tiny_target_dir, device="cpu", dtype="bf16").fingerprint == own
    assert load_target(make_tiny_target(tmp_path / "seed", seed=1), device="cpu").fingerprint != own
    tuned = load_target(tiny_target_dir, device="cpu")
    tuned.model.model.layers[5].mlp.up_proj.weight.data.mul_(1.05)
    assert tuned.fingerprint != own
    folder = Path(shutil.copytree(tiny_target_dir, tmp_path / "rope"))
    config = json.loads((folder / "config.json").read_text())
    config["rope_parameters"]["rope_theta"] = 500000.0
    (folder / "config.json").write_text(json.dumps(config))
    assert load_target(folder, device="cpu").fingerprint != own


def _write_gguf(source: Path, file: Path) -> None:
    """Write the tiny Llama as llama.cpp would: own names, q and k rows permuted for its rotation."""
    import gguf

    config = LlamaConfig.from_pretrained(source)
    tensors, _ = load_tensors(source / "model.safetensors")
    writer = gguf.GGUFWriter(str(file), "llama")
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(10000.0)
    writer.add_rope_dimension_count(8)
    writer.add_vocab_size(config.vocab_size)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list([f"t{i}" for i in range(config.vocab_size)])
    names = {
        "self_attn.q_proj": "attn_q",
        "self_attn.k_proj": "attn_k",
        "self_attn.v_proj": "attn_v",
        "self_attn.o_proj": "attn_output",
        "mlp.gate_proj": "ffn_gate",
        "mlp.up_proj": "ffn_up",
        "mlp.down_proj": "ffn_down",
        "input_layernorm": "attn_norm",
        "post_attention_layernorm": "ffn_norm",
    }
    heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}
    for name, tensor in tensors.items():
        array = tensor.numpy()
        parts = name.split(".")
        if name.startswith("model.layers."):
            kind = names[".".join(parts[3:-1])]
            if kind in heads:
                shape = (heads[kind], 2, len(array) // heads[kind] // 2, *array.shape[1:])
                array = array.reshape(shape).swapaxes(1, 2).reshape(array.shape)
            writer.add_tensor(f"blk.{parts[2]}.{kind}.weight", np.ascontiguousarray(array))
        else:
            own = {
                "model.embed_tokens.weight": "token_embd.weight",
                "model.norm.weight": "output_norm.weight",
            }
            writer.add_tensor(own[name], array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def test_a_gguf_file_gives_the_same_logits(tiny_target_dir: Path, tmp_path: Path) -> None:
    _write_gguf(tiny_target_dir, tmp_path / "tiny.gguf")
    got = _logits(tmp_path / "tiny.gguf", dtype="fp32")
    torch.testing.assert_close(got, _logits(tiny_target_dir), rtol=1e-5, atol=1e-5)
    target = load_target(tmp_path / "tiny.gguf", device="cpu", dtype="fp32")
    target.model.save_pretrained(tmp_path / "saved")  # dequantised: an ordinary model
    assert target.frozen().tied


@pytest.mark.parametrize(
    ("stored", "computes", "is_gguf", "expected"),
    [
        ("float32", True, False, torch.float32),
        ("bfloat16", True, False, torch.bfloat16),
        ("float16", True, False, torch.bfloat16),
        ("bfloat16", False, False, torch.float32),
        (None, True, True, torch.bfloat16),
    ],
)
def test_the_default_dtype_follows_checkpoint_and_hardware(
    monkeypatch: pytest.MonkeyPatch, stored: str | None, computes: bool, is_gguf: bool, expected: torch.dtype
) -> None:
    monkeypatch.setattr(checkpoint, "computes_in_bf16", lambda device: computes)
    config = LlamaConfig(dtype=stored)
    assert checkpoint.default_dtype(config, torch.device("cpu"), is_gguf) == expected


def test_dtypes_by_name(tiny_target_dir: Path) -> None:
    assert parse_dtype("auto") is None
    assert parse_dtype("bf16") == parse_dtype("bfloat16") == torch.bfloat16
    assert [dtype_name(t) for t in (torch.float32, torch.bfloat16, torch.float16)] == ["fp32", "bf16", "fp16"]
    assert load_target(tiny_target_dir, dtype="bf16", device="cpu").dtype == torch.bfloat16
    with pytest.raises(UserError, match=r"dtype fb16: wanted auto, fp32, bf16 or fp16; did you mean '\w+16'"):
        parse_dtype("fb16")


def test_device_map_spreads_over_what_there_is(tiny_target_dir: Path) -> None:
    assert torch.equal(_logits(tiny_target_dir, device_map="auto"), _logits(tiny_target_dir))


def test_a_missing_tensor_is_named_and_never_made_up(tiny_target_dir: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(tiny_target_dir, tmp_path / "t"))
    tensors, metadata = load_tensors(folder / "model.safetensors")
    del tensors["model.layers.3.mlp.up_proj.weight"]
    save_tensors(folder / "model.safetensors", tensors, metadata)
    with pytest.raises(UserError, match=r"lacks 1 of the model's tensors \(model\.layers\.3\.mlp\.up_proj"):
        load_target(folder, device="cpu")


@pytest.mark.parametrize("load", [load_tokenizer, lambda folder: checkpoint.load_config(folder, False)])
@pytest.mark.parametrize(
    ("field", "value"), [("hidden_size", "32"), ("rms_norm_eps", []), ("vocab_size", 1.5)]
)
def test_a_config_of_a_wrong_type_is_named_in_one_line(
    tiny_target_dir: Path, tmp_path: Path, field: str, value: object, load: Callable[[str], object]
) -> None:
    folder = Path(shutil.copytree(tiny_target_dir, tmp_path / "t"))
    record = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**record, field: value}))
    (folder / "tokenizer_config.json").write_text("{}")  # the config has to say which tokenizer it is
    with pytest.raises(UserError) as caught:
        load(str(folder))
    assert str(caught.value).startswith(f"{folder}: config.json: ")
    assert field in str(caught.value)


def test_a_cut_weight_file_is_named(tiny_target_dir: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(tiny_target_dir, tmp_path / "t"))
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:5000])
    with pytest.raises(UserError, match="t: a weight file is damaged"):
        load_target(folder, device="cpu")


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("./nowhere", "no such directory"),
        ("/nowhere/model.gguf", "no such file; give a hub id, a directory or a .gguf file"),
        ("a/b/c", "no such directory"),
    ],
)
def test_a_target_that_is_not_there_is_named(name: str, words: str) -> None:
    with pytest.raises(UserError) as caught:
        load_target(name, device="cpu")
    assert str(caught.value).startswith(f"{name}: {words}")


def test_a_folder_without_a_config_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"holds no config\.json"):
        load_target(tmp_path, device="cpu")


def test_a_hub_id_offline_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    import huggingface_hub.constants

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(UserError, match="no-one/nothing-here: could not be loaded") as caught:
        load_target("no-one/nothing-here", device="cpu")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("device", "count", "words"),
    [
        ("cuda", 0, "--device cuda: no CUDA device is visible here; use --device cpu"),
        ("cuda:1", 0, "--device cuda:1: no CUDA device is visible here; use --device cpu"),
        ("cuda:2", 2, "--device cuda:2: 2 CUDA devices are visible, 0 to 1; use one of them"),
        ("gpu", 2, "--device gpu: wanted cpu, cuda or cuda:N"),
    ],
)
def test_a_device_that_is_not_there_is_refused(
    tiny_target_dir: Path, monkeypatch: pytest.MonkeyPatch, device: str, count: int, words: str
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    with pytest.raises(UserError) as caught:
        load_target(tiny_target_dir, device=device)
    assert str(caught.value) == words


def test_a_plain_cuda_is_this_ranks_own_and_a_number_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setenv("LOCAL_RANK", "3")
    assert [pick_device(name) for name in (None, "cuda", "cuda:1", "cpu")] == [
        torch.device("cuda", 3),
        torch.device("cuda", 3),
        torch.device("cuda", 1),
        torch.device("cpu"),
    ]


def test_weights_that_a_device_does_not_hold_are_one_line(
    tiny_target_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers import LlamaForCausalLM

    def full(self: torch.nn.Module, *arguments: object, **more: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 9 GiB\nGPU 0 has 1 GiB free")

    monkeypatch.setattr(LlamaForCausalLM, "to", full)
    with pytest.raises(UserError) as caught:
        load_target(tiny_target_dir, device="cpu")
    assert str(caught.value) == (
        f"{tiny_target_dir}: 0.0 GiB of weights do not go onto cpu (CUDA out of memory. Tried to allocate "
        "9 GiB); use bf16, a device with more room, or --device-map auto of eval, extract and regenerate"
    )
