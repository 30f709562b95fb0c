"""Heads as other toolkits write them, and what such a head computes, written out plainly."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

H, INNER, HEADS, KV, HD, V, D, N = 32, 48, 4, 2, 16, 60, 40, 12
SIZES = {
    "hidden_size": H,
    "intermediate_size": INNER,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV,
    "head_dim": HD,
    "num_hidden_layers": 1,
    "vocab_size": V,
    "rms_norm_eps": 3e-5,
    "hidden_act": "silu",
    "max_position_embeddings": 512,
    "rope_theta": 25000.0,
}
EAGLE3 = {"architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama", "draft_vocab_size": D, **SIZES}
SPEC_FORGE = {**EAGLE3, "eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 5, 8]}}
SPECULATORS = {
    "architectures": ["Eagle3Speculator"],
    "speculators_model_type": "eagle3",
    "draft_vocab_size": D,
    "norm_before_residual": False,
    "eagle_aux_hidden_state_layer_ids": [2, 6, 9],
    "speculators_config": {"algorithm": "eagle3", "verifier": {"name_or_path": "org/target"}},
    "transformer_layer_config": {"model_type": "llama", **SIZES},
}
EAGLE1 = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", **SIZES}
USUAL = (2, 6, 9)  # of 12 layers


def random_tensors(prefix: str, width: int, seed: int = 0) -> dict[str, torch.Tensor]:
    """One decoder layer without its input norm, every weight random."""
    generator = torch.Generator().manual_seed(seed)

    def matrix(rows: int, columns: int) -> torch.Tensor:
        return torch.randn(rows, columns, generator=generator) * columns**-0.5

    return {
        f"{prefix}.self_attn.q_proj.weight": matrix(HEADS * HD, width),
        f"{prefix}.self_attn.k_proj.weight": matrix(KV * HD, width),
        f"{prefix}.self_attn.v_proj.weight": matrix(KV * HD, width),
        f"{prefix}.self_attn.o_proj.weight": matrix(H, HEADS * HD),
        f"{prefix}.mlp.gate_proj.weight": matrix(INNER, H),
        f"{prefix}.mlp.up_proj.weight": matrix(INNER, H),
        f"{prefix}.mlp.down_proj.weight": matrix(H, INNER),
        f"{prefix}.post_attention_layernorm.weight": 1 + 0.3 * torch.randn(H, generator=generator),
    }


def eagle3_tensors(prefix: str, *, vocabulary: int = D, t2d: bool = True) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(7)
    tensors = random_tensors(prefix, 2 * H) | {
        f"{prefix}.input_layernorm.weight": 1 + 0.3 * torch.randn(H, generator=generator),
        f"{prefix}.hidden_norm.weight": 1 + 0.3 * torch.randn(H, generator=generator),
        "norm.weight": 1 + 0.3 * torch.randn(H, generator=generator),
        "fc.weight": torch.randn(H, 3 * H, generator=generator) * (3 * H) ** -0.5,
        "lm_head.weight": torch.randn(vocabulary, H, generator=generator) * H**-0.5,
    }
    if vocabulary < V:
        ids = torch.randperm(V, generator=generator)[:vocabulary].sort().values
        tensors["d2t"] = ids - torch.arange(vocabulary)
        if t2d:
            tensors["t2d"] = torch.zeros(V, dtype=torch.bool).index_fill_(0, ids, True)
    return tensors


def eagle1_tensors(prefix: str = "layers.0") -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(8)
    fc = torch.randn(H, 2 * H, generator=generator) * (2 * H) ** -0.5
    return random_tensors(prefix, H) | {"fc.weight": fc}


def write(folder: Path, config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
    return folder


def eagle3_config(top: list[int] | None, nested: list[int] | None) -> dict[str, Any]:
    """An EAGLE-3 config whose layer ids stand at the top level, in eagle_config, in both or in none."""
    ids = "eagle_aux_hidden_state_layer_ids"
    return {**EAGLE3, **({ids: top} if top else {}), **({"eagle_config": {ids: nested}} if nested else {})}


class Forward:
    """A Llama draft layer written out from the tensors alone; what a config may say is told by arguments."""

    def __init__(
        self, tensors: dict[str, torch.Tensor], prefix: str, base: float = 25000.0, **how: Any
    ) -> None:
        self.w, self.prefix, self.how = tensors, prefix, how
        self.frequencies = base ** -(torch.arange(0, HD, 2) / HD)

    def norm(self, x: torch.Tensor, name: str) -> torch.Tensor:
        return x / (x.square().mean(-1, keepdim=True) + 3e-5).sqrt() * self.w[name]

    def linear(self, x: torch.Tensor, name: str) -> torch.Tensor:
        return x @ self.w[f"{name}.weight"].T + self.w.get(f"{name}.bias", 0.0)

    def two_steps(
        self, features: torch.Tensor, embeds: torch.Tensor, positions: torch.Tensor
    ) -> torch.Tensor:
        """Return the outputs [2, rows, H], or the logits of an eagle3 head [2, rows, D]."""
        if not self.how.get("eagle3"):
            first = self.layer(features, embeds[0], positions)
            return torch.stack([first, self.layer(first, embeds[1], positions)])
        if self.how.get("norm_before_fc"):
            features = self.norm(features, "input_norm.weight")
        if self.how.get("fc_norm"):
            parts = enumerate(features.chunk(3, dim=-1))
            features = torch.cat([self.norm(x, f"fc_norm.{i}.weight") for i, x in parts], dim=-1)
        first = self.layer(self.linear(features, "fc"), embeds[0], positions)
        carried = self.norm(first, "norm.weight") if self.how.get("norm_output") else first
        outs = torch.stack([first, self.layer(carried, embeds[1], positions)])
        return self.norm(outs, "norm.weight") @ self.w["lm_head.weight"].T

    def layer(self, hidden: torch.Tensor, embeds: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        p = self.prefix
        if self.how.get("eagle3"):
            normed = self.norm(hidden, f"{p}.hidden_norm.weight")
            read = torch.cat([self.norm(embeds, f"{p}.input_layernorm.weight"), normed], dim=-1)
            stream = normed if self.how.get("norm_before_residual") else hidden
        else:
            read = stream = self.linear(torch.cat([embeds, hidden], dim=-1), self.how.get("fc", "fc"))
        q, k, v = (self.linear(read, f"{p}.self_attn.{n}_proj").unflatten(-1, (-1, HD)) for n in "qkv")
        angles = positions[:, None, None] * self.frequencies
        if f"{p}.self_attn.q_norm.weight" in self.w:
            q, k = (self.norm(x, f"{p}.self_attn.{n}_norm.weight") for x, n in ((q, "q"), (k, "k")))
        q, k = self.turn(q, angles), self.turn(k, angles)
        rows = []
        for t in range(len(read)):
            heads = []
            for head in range(HEADS):
                keys, values = k[: t + 1, head // (HEADS // KV)], v[: t + 1, head // (HEADS // KV)]
                heads.append((keys @ q[t, head] / math.sqrt(HD)).softmax(0) @ values)
            rows.append(torch.cat(heads))
        stream = stream + self.linear(torch.stack(rows), f"{p}.self_attn.o_proj")
        x = self.norm(stream, f"{p}.post_attention_layernorm.weight")
        gated = torch.nn.functional.silu(self.linear(x, f"{p}.mlp.gate_proj"))
        return stream + self.linear(gated * self.linear(x, f"{p}.mlp.up_proj"), f"{p}.mlp.down_proj")

    @staticmethod
    def turn(x: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
        pairs = torch.view_as_complex(torch.stack(x.chunk(2, dim=-1), dim=-1).contiguous())
        turned = torch.view_as_real(pairs * torch.polar(torch.ones_like(angles), angles))
        return torch.cat([turned[..., 0], turned[..., 1]], dim=-1)


def ours(head: Any, features: torch.Tensor, embeds: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    def attend(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        k, v = k.repeat_interleave(HEADS // KV, dim=1), v.repeat_interleave(HEADS // KV, dim=1)
        seen = torch.ones(len(q), len(k), dtype=torch.bool).tril()
        scores = torch.einsum("qhd,khd->hqk", q, k).masked_fill(~seen, -torch.inf) / math.sqrt(HD)
        return torch.einsum("hqk,khd->qhd", scores.softmax(-1), v)

    with torch.no_grad():
        first = head(head.start(features), embeds[0], positions, attend)
        outs = torch.stack([first, head(head.carry(first), embeds[1], positions, attend)])
        return head.lm_head(head.final(outs)) if head.config.kind == "eagle3" else outs


def assert_same(head: Any, forward: Forward) -> None:
    generator = torch.Generator().manual_seed(3)
    features = torch.randn(6, head.config.feature_width, generator=generator)
    embeds = torch.randn(2, 6, H, generator=generator)
    positions = torch.tensor([0, 1, 7, 100, 101, 400])
    expected = forward.two_steps(features, embeds, positions)
    torch.testing.assert_close(ours(head, features, embeds, positions), expected, rtol=1e-4, atol=1e-5)
