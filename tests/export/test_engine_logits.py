"""An engine that reads only the exported directory computes the trained head's logits."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from eagle_train.export.export import export
from eagle_train.heads.foreign import read_any
from eagle_train.io.tensors import load_tensors


def test_sglang_eagle1_bias_is_zero_and_vllm_form_comes_back_from_it(head_dir, tmp_path):
    source = head_dir("eagle1")
    export(source, tmp_path / "sglang", engine="sglang", dtype="keep")
    stored, _ = load_tensors(tmp_path / "sglang" / "model.safetensors")
    assert stored["fc.bias"].count_nonzero() == 0
    export(tmp_path / "sglang", tmp_path / "vllm", engine="vllm", dtype="keep")
    back, _ = load_tensors(tmp_path / "vllm" / "model.safetensors")
    trained, _ = load_tensors(source / "model.safetensors")
    assert back.keys() == trained.keys()
    assert all(torch.equal(back[name], trained[name]) for name in trained)


@pytest.mark.parametrize(
    ("kind", "engine", "fields"),
    [
        ("eagle3", "vllm", {}),
        ("eagle3", "sglang", {"llama3": True}),
        ("eagle3", "vllm", {"draft_vocab_size": 40, "fc_norm": True, "norm_output": True}),
        ("eagle3", "vllm", {"norm_before_fc": True, "norm_before_residual": True}),
        ("eagle3", "speculators", {"norm_before_residual": True, "fc_norm": True, "llama3": True}),
        ("eagle1", "vllm", {"llama3": True}),
        ("eagle1", "sglang", {}),
        ("eagle3", "vllm", {"num_hidden_layers": 3, "norm_output": True}),
        ("eagle3", "sglang", {"num_hidden_layers": 3, "fc_norm": True}),
        ("eagle3", "speculators", {"num_hidden_layers": 2}),
        ("eagle1", "vllm", {"num_hidden_layers": 2}),
        ("eagle1", "sglang", {"num_hidden_layers": 2}),
    ],
)
def test_an_engine_that_reads_only_the_directory_computes_the_trained_logits(
    kind, engine, fields, head_dir, tmp_path
):
    source, out = head_dir(kind, **fields), tmp_path / "out"
    export(source, out, engine=engine, dtype="keep")
    rows, generator = 6, torch.Generator().manual_seed(5)
    width = 96 if kind == "eagle3" else 32
    features = torch.randn(rows, width, generator=generator)
    embeds = torch.randn(2, rows, 32, generator=generator)
    positions = torch.tensor([0, 3, 40, 41, 300, 500])
    engine_outs = _Engine(out, engine).two_steps(features, embeds, positions)

    for folder in (source, out):
        head = read_any(folder)
        with torch.no_grad():
            first = head(head.start(features), embeds[0], positions, _attend)
            second = head(head.carry(first), embeds[1], positions, _attend)
            ours = torch.stack([first, second])
            ours = head.lm_head(head.final(ours)) if kind == "eagle3" else ours
        torch.testing.assert_close(ours, engine_outs, rtol=1e-4, atol=1e-5)


def test_medusa_heads_are_each_a_block_and_an_output_map(head_dir, tmp_path):
    made = export(head_dir("medusa", medusa_heads=2), tmp_path / "out", engine="vllm", dtype="keep")
    assert '"method": "medusa", "model": ' in made["serve"]["vllm"]
    assert '"num_speculative_tokens": 2' in made["serve"]["vllm"]
    w, _ = load_tensors(tmp_path / "out" / "model.safetensors")
    reference, _ = load_tensors(tmp_path / "out" / "check" / "reference.safetensors")
    x = reference["features"]
    for i in range(2):
        block = x @ w[f"blocks.{i}.layers.0.weight"].T + w[f"blocks.{i}.layers.0.bias"]
        logits = (x + block * block.sigmoid()) @ w[f"lm_heads.{i}.weight"].T
        torch.testing.assert_close(logits, reference["logits"][i], rtol=1e-4, atol=1e-5)
    read = read_any(tmp_path / "out")
    assert (read.config.kind, read.config.medusa_heads) == ("medusa", 2)


def test_the_reference_file_holds_inputs_and_what_an_engine_makes_of_them(head_dir, tmp_path):
    for kind in ("eagle1", "eagle3"):
        export(head_dir(kind, name=kind), tmp_path / "out", engine="vllm", dtype="keep")
        reference, meaning = load_tensors(tmp_path / "out" / "check" / "reference.safetensors")
        outputs = reference.pop("states" if kind == "eagle1" else "logits")
        assert set(reference) == {"features", "embeds", "positions"}
        assert all(f"{name}: " in meaning["meaning"] for name in reference)
        got = _Engine(tmp_path / "out", "vllm").two_steps(**reference)
        torch.testing.assert_close(got, outputs, rtol=1e-4, atol=1e-5)


def _attend(layer, q, k, v):
    k, v = k.repeat_interleave(2, dim=1), v.repeat_interleave(2, dim=1)
    out = torch.nn.functional.scaled_dot_product_attention(
        q.transpose(0, 1), k.transpose(0, 1), v.transpose(0, 1), is_causal=True
    )
    return out.transpose(0, 1)


class _Engine:
    """The forward of the engines' Llama heads, from config.json's public fields and the tensors alone."""

    def __init__(self, folder: Path, engine: str) -> None:
        from transformers import LlamaConfig
        from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

        self.config = json.loads((folder / "config.json").read_text())
        self.config.pop("eagle_train", None)  # no engine reads it
        layer = self.config.get("transformer_layer_config", self.config)
        self.rotary = LlamaRotaryEmbedding(LlamaConfig.from_dict(layer))
        self.config = {**layer, **self.config}
        stored, _ = load_tensors(folder / "model.safetensors")
        self.eagle3 = any("hidden_norm" in name for name in stored)
        self.w = {name.replace("midlayer.", "layers.0."): tensor for name, tensor in stored.items()}
        self.input_norm = "hidden_norm" if self.eagle3 and engine == "sglang" else "input_layernorm"

    def two_steps(self, features, embeds, positions):
        outs, hidden = [], features
        if self.eagle3:
            if self.config.get("norm_before_fc"):
                hidden = self.norm(hidden, "input_norm")
            if self.config["fc_norm"]:
                parts = hidden.chunk(3, dim=-1)
                hidden = torch.cat([self.norm(x, f"fc_norm.{i}") for i, x in enumerate(parts)], dim=-1)
            hidden = hidden @ self.w["fc.weight"].T
        for step in range(2):
            out = self.layers(hidden, embeds[step], positions)
            hidden = self.norm(out, "norm") if self.config.get("norm_output") else out
            outs.append(out)
        outs = torch.stack(outs)
        if "lm_head.weight" not in self.w:
            return outs
        return self.norm(outs, "norm") @ self.w["lm_head.weight"].T

    def layers(self, hidden, embeds, positions):
        if self.eagle3:
            normed = self.norm(embeds, "layers.0.input_layernorm"), self.norm(hidden, "layers.0.hidden_norm")
            inputs = torch.cat(normed, dim=-1)
            residual = normed[1] if self.config.get("norm_before_residual") else hidden
        else:
            fused = torch.cat([embeds, hidden], dim=-1) @ self.w["fc.weight"].T
            inputs = residual = fused + self.w.get("fc.bias", 0)
        out = self.layer("layers.0", inputs, residual, positions)
        for i in range(1, self.config["num_hidden_layers"]):
            inputs = self.norm(out, f"layers.{i}.{self.input_norm}")
            out = self.layer(f"layers.{i}", inputs, out, positions)
        return out

    def layer(self, prefix, inputs, residual, positions):
        hd = self.config["head_dim"]
        q, k, v = (
            (inputs @ self.w[f"{prefix}.self_attn.{n}_proj.weight"].T).unflatten(-1, (-1, hd)) for n in "qkv"
        )
        cos, sin = (angle[0][:, None] for angle in self.rotary(inputs, positions[None]))

        def turn(x):
            low, high = x.chunk(2, dim=-1)
            return x * cos + torch.cat([-high, low], dim=-1) * sin

        attended = _attend(0, turn(q), turn(k), v).flatten(-2)
        residual = residual + attended @ self.w[f"{prefix}.self_attn.o_proj.weight"].T
        x = self.norm(residual, f"{prefix}.post_attention_layernorm")
        gate = torch.nn.functional.silu(x @ self.w[f"{prefix}.mlp.gate_proj.weight"].T)
        up = x @ self.w[f"{prefix}.mlp.up_proj.weight"].T
        return residual + (gate * up) @ self.w[f"{prefix}.mlp.down_proj.weight"].T

    def norm(self, x, name):
        scale = torch.rsqrt(x.square().mean(-1, keepdim=True) + self.config["rms_norm_eps"])
        return x * scale * self.w[f"{name}.weight"]
