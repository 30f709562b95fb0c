"""Heads that other toolkits wrote compute here what they compute there, or are refused by name."""

from __future__ import annotations

import json
import math
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from eagle_train.errors import UserError
from eagle_train.heads.disk import load_head, save_head
from eagle_train.heads.foreign import is_foreign, read_foreign
from eagle_train.heads.foreign_config import Told

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
MODEL_OPT = {
    **EAGLE3,
    "eagle_config": {
        "eagle_aux_hidden_state_layer_ids": [8, 1, 5],
        "use_aux_hidden_state": True,
        "use_input_layernorm_in_first_layer": True,
        "use_last_layernorm": True,
        "use_mtp_layernorm": False,
        "next_layer_regular": True,
        "parallel_draft_step": 1,
    },
}
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


_NORMS = {f"fc_norm.{i}.weight": torch.linspace(0.5, 1.5, H) + 0.1 * i for i in range(3)}
_EAGLE3_CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "EAGLE": ("midlayer", EAGLE3, {}, {}),
    "SpecForge": ("midlayer", SPEC_FORGE, {}, {}),
    "ModelOpt": ("layers.0", MODEL_OPT, {"t2d": False}, {}),
    "speculators": ("layers.0", SPECULATORS, {}, {}),
    "speculators, norm before residual": (
        "layers.0",
        {**SPECULATORS, "norm_before_residual": True},
        {},
        {"norm_before_residual": True},
    ),
    "speculators, norm before fc": (
        "layers.0",
        {**SPECULATORS, "norm_before_fc": True, "norm_output": True},
        {"extra": {"input_norm.weight": torch.linspace(0.5, 1.5, 3 * H)}},
        {"norm_before_fc": True, "norm_output": True},
    ),
    "speculators, qwen3": (
        "layers.0",
        {**SPECULATORS, "transformer_layer_config": {"model_type": "qwen3", **SIZES}},
        {"extra": {f"layers.0.self_attn.{n}_norm.weight": torch.linspace(0.5, 2, HD) for n in "qk"}},
        {},
    ),
    "norm before fc said in eagle_config": (
        "layers.0",
        {**MODEL_OPT, "eagle_config": {**MODEL_OPT["eagle_config"], "norm_before_fc": True}},
        {"extra": {"input_norm.weight": torch.linspace(0.5, 1.5, 3 * H)}},
        {"norm_before_fc": True},
    ),
    "SpecForge, 3.1": (
        "midlayer",
        {**SPEC_FORGE, "fc_norm": True, "norm_output": True},
        {"extra": _NORMS},
        {"fc_norm": True, "norm_output": True},
    ),
}


@pytest.mark.parametrize("case", _EAGLE3_CASES)
def test_an_eagle3_head_of_every_layout_computes_its_own_logits(case, tmp_path):
    prefix, config, made, how = _EAGLE3_CASES[case]
    tensors = eagle3_tensors(prefix, t2d=made.get("t2d", True)) | made.get("extra", {})
    copies = {"embed_tokens.weight": torch.randn(V, H)} if "speculators" in case else {}
    folder = write(tmp_path / "head", config, tensors | copies)
    assert is_foreign(folder)
    read = read_foreign(folder, num_target_layers=N)
    assert read.layout == case.split(",")[0] or case.startswith("norm before")
    assert read.head.config.layers_for(N) == USUAL
    assert_same(read.head, Forward(tensors, prefix, eagle3=True, **how))
    ids = tensors["d2t"] + torch.arange(D)
    assert read.head.draft_ids.tolist() == ids.tolist()
    assert read.head.in_draft.nonzero().flatten().tolist() == ids.tolist()

    save_head(read.head, tmp_path / "ours")  # and stays so once it is a head of ours
    assert not is_foreign(tmp_path / "ours")
    assert_same(load_head(tmp_path / "ours"), Forward(tensors, prefix, eagle3=True, **how))


def test_norms_before_fc_under_their_older_names_are_the_same_norms(tmp_path):
    old = dict(
        zip(
            ("aux_norm_low.weight", "aux_norm_mid.weight", "aux_norm_high.weight"),
            _NORMS.values(),
            strict=True,
        )
    )
    tensors = eagle3_tensors("midlayer")
    head = read_foreign(write(tmp_path / "head", {**EAGLE3, "use_aux_norm": True}, tensors | old)).head
    assert_same(head, Forward(tensors | _NORMS, "midlayer", eagle3=True, fc_norm=True))


def test_a_whole_vocabulary_needs_no_maps_and_takes_idle_ones(tmp_path):
    tensors = eagle3_tensors("midlayer", vocabulary=V)
    idle = {"d2t": torch.zeros(V, dtype=torch.int64), "t2d": torch.zeros(V, dtype=torch.bool)}
    config = {**EAGLE3, "draft_vocab_size": V}
    head = read_foreign(write(tmp_path / "idle", config, tensors | idle)).head
    assert not head.config.reduced_vocabulary
    assert_same(head, Forward(tensors, "midlayer", eagle3=True))
    idle["d2t"][3] = 1
    with pytest.raises(UserError, match="d2t moves ids although the head drafts the whole vocabulary"):
        read_foreign(write(tmp_path / "moved", config, tensors | idle))


@pytest.mark.parametrize("case", ["official", "with bias", "speculators", "q, k and v biases"])
def test_an_eagle1_head_of_every_layout_computes_its_own_states(case, tmp_path):
    tensors, config, prefix, how = eagle1_tensors(), dict(EAGLE1), "layers.0", {}
    if case == "with bias":
        tensors["fc.bias"] = torch.linspace(-1, 1, H)
        config["bias"] = True
    if case == "q, k and v biases":
        tensors |= {
            f"layers.0.self_attn.{n}_proj.bias": torch.linspace(-1, 1, size)
            for n, size in (("q", HEADS * HD), ("k", KV * HD), ("v", KV * HD))
        }
    if case == "speculators":
        prefix, how = "transformer", {"fc": "fusion_fc"}
        tensors = eagle1_tensors(prefix)
        tensors["fusion_fc.weight"] = tensors.pop("fc.weight")
        config = {
            "speculators_model_type": "eagle",
            "layernorms": False,
            "fusion_bias": False,
            "transformer_layer_config": SIZES,
        }
    copies = {"embed_tokens.weight": torch.randn(V, H)}
    read = read_foreign(write(tmp_path / "head", config, tensors | copies))
    assert read.head.config.kind == "eagle1"
    assert_same(read.head, Forward(tensors, prefix, **how))


@pytest.mark.parametrize("layout", ["vLLM", "Medusa's own"])
def test_medusa_heads_of_both_layouts_compute_their_own_logits(layout, tmp_path):
    generator = torch.Generator().manual_seed(4)
    blocks = [torch.randn(H, H, generator=generator) * H**-0.5 for _ in range(3)]
    biases = [torch.randn(H, generator=generator) for _ in range(3)]
    maps = [torch.randn(V, H, generator=generator) for _ in range(3)]
    names = ("blocks.{}.layers.0.weight", "blocks.{}.layers.0.bias", "lm_heads.{}.weight")
    config: dict[str, Any] = {"model_type": "medusa", "num_heads": 3, "vocab_size": V, "hidden_size": H}
    if layout != "vLLM":
        names = ("{}.0.linear.weight", "{}.0.linear.bias", "{}.1.weight")
        config = {"medusa_num_heads": 3, "medusa_num_layers": 1, "base_model_name_or_path": "lmsys/vicuna-7b"}
    tensors = {
        name.format(i): value[i]
        for name, value in zip(names, (blocks, biases, maps), strict=True)
        for i in range(3)
    }
    head = read_foreign(write(tmp_path / "head", config, tensors)).head
    assert (head.config.kind, head.config.medusa_heads, head.config.vocab_size) == ("medusa", 3, V)
    x = torch.randn(5, H, generator=generator)
    for i in range(3):
        block = x @ blocks[i].T + biases[i]
        got = head.logits(head(x, i), None, i)
        torch.testing.assert_close(got, (x + block * block.sigmoid()) @ maps[i].T, rtol=1e-4, atol=1e-5)
    deeper = tensors | {
        names[0].format(1).replace("0.linear", "1.linear").replace("layers.0", "layers.1"): blocks[0].clone()
    }
    with pytest.raises(UserError, match="Medusa blocks of several layers"):
        read_foreign(write(tmp_path / "deeper", config, deeper))


def test_a_second_layer_is_numbered_from_the_first(tmp_path):
    tensors = eagle3_tensors("layers.0") | random_tensors("layers.1", H, seed=5)
    tensors["layers.1.input_layernorm.weight"] = torch.linspace(0.5, 1.5, H)
    inner = {**SIZES, "num_hidden_layers": 2}
    folder = write(tmp_path / "head", {**SPECULATORS, "transformer_layer_config": inner}, tensors)
    head = read_foreign(folder).head
    assert head.config.num_hidden_layers == 2
    got = head.layers[0].self_attn.q_proj.weight
    assert torch.equal(got, tensors["layers.1.self_attn.q_proj.weight"])


def test_a_pickle_is_read_weights_only_and_on_request(tmp_path):
    tensors = eagle3_tensors("midlayer")
    folder = tmp_path / "head"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(EAGLE3))
    torch.save(tensors, folder / "pytorch_model.bin")
    with pytest.raises(UserError, match=r"a pickle, which is read .* on request alone, --allow-bin"):
        read_foreign(folder)
    assert_same(read_foreign(folder, Told(pickled=True)).head, Forward(tensors, "midlayer", eagle3=True))

    class Trap:
        def __reduce__(self):
            return (Path.touch, (tmp_path / "sprung",))

    (folder / "pytorch_model.bin").write_bytes(pickle.dumps({"fc.weight": Trap()}))
    with pytest.raises(UserError, match="cannot be read weights-only"):
        read_foreign(folder, Told(pickled=True))
    assert not (tmp_path / "sprung").exists()


@pytest.mark.parametrize(
    ("top", "nested", "depth", "layers"),
    [
        ([2, 6, 9], [1, 5, 8], None, (2, 6, 9)),  # both, one apart: what our own exports hold
        ([3, 7, 10], None, N, (3, 7, 10)),  # top level alone: inputs of layers
        (None, [1, 5, 8], N, USUAL),  # the usual three as outputs
        (None, [2, 6, 9], N, USUAL),  # the usual three as inputs
        (None, [8, 1, 5], N, USUAL),  # in any order: states are captured low to high
        (None, None, N, ()),
    ],
)
def test_layer_ids_are_resolved_where_only_one_reading_fits(top, nested, depth, layers, tmp_path):
    config = dict(EAGLE3)
    if top:
        config["eagle_aux_hidden_state_layer_ids"] = top
    if nested:
        config["eagle_config"] = {"eagle_aux_hidden_state_layer_ids": nested}
    folder = write(tmp_path / "head", config, eagle3_tensors("midlayer"))
    assert read_foreign(folder, num_target_layers=depth).head.config.feature_layers == layers


@pytest.mark.parametrize(
    ("top", "nested", "depth", "words"),
    [
        (None, [1, 5, 8], None, r"give --target, whose depth may tell, or --layer-ids"),
        (None, [3, 7, 10], N, r"hs\[3,7,10\] .* or hs\[4,8,11\] .*; say --layer-ids 3,7,10 or .* 4,8,11"),
        ([1, 5, 8], None, N, r"say --layer-ids 1,5,8 or --layer-ids 2,6,9"),
        ([2, 6, 9], [2, 6, 9], N, r"say --layer-ids 2,6,9 or --layer-ids 3,7,10"),
    ],
)
def test_layer_ids_with_two_readings_are_asked_for(top, nested, depth, words, tmp_path):
    config = dict(EAGLE3)
    if top:
        config["eagle_aux_hidden_state_layer_ids"] = top
    if nested:
        config["eagle_config"] = {"eagle_aux_hidden_state_layer_ids": nested}
    folder = write(tmp_path / "head", config, eagle3_tensors("midlayer"))
    with pytest.raises(UserError, match=words):
        read_foreign(folder, num_target_layers=depth)
    told = Told(layer_ids=(4, 8, 11))
    assert read_foreign(folder, told, depth).head.config.feature_layers == (4, 8, 11)


@pytest.mark.parametrize(
    ("changes", "told", "base"),
    [
        ({}, Told(), 25000.0),
        ({"rope_theta": None, "rope_parameters": {"rope_type": "default", "rope_theta": 9e5}}, Told(), 9e5),
        ({"rope_theta": None}, Told(), 10000.0),
        ({}, Told(rope_theta=5e5), 5e5),
        ({"rope_scaling": {"type": "llama3", "factor": 8.0}}, Told(rope_theta=10000.0), 10000.0),
    ],
)
def test_rope_is_taken_from_wherever_it_stands(changes, told, base, tmp_path):
    tensors = eagle3_tensors("midlayer")
    read = read_foreign(write(tmp_path / "head", {**EAGLE3, **changes}, tensors), told)
    assert_same(read.head, Forward(tensors, "midlayer", base, eagle3=True))
    assert any("rope_theta is absent" in note for note in read.notes) == (
        base == 10000.0 and not told.rope_theta
    )


def test_scaled_rope_is_read_and_its_trap_named(tmp_path):
    scaling = {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 128,
    }
    read = read_foreign(
        write(tmp_path / "head", {**EAGLE3, "rope_scaling": scaling}, eagle3_tensors("midlayer"))
    )
    assert read.head.config.rope_parameters == {**scaling, "rope_theta": 25000.0}
    assert any("try --rope-theta 10000" in note for note in read.notes)


@pytest.mark.parametrize(
    ("changes", "told", "window"),
    [
        ({"sliding_window": 9, "layer_types": ["sliding_attention"]}, Told(), 9),
        ({"sliding_window": 9, "layer_types": ["full_attention"]}, Told(), None),
        ({"sliding_window": 9, "use_sliding_window": False}, Told(), None),
        ({"sliding_window": None, "use_sliding_window": True}, Told(), None),
        ({"sliding_window": 9}, Told(sliding_window=9), 9),
        ({"sliding_window": 9}, Told(sliding_window=0), None),
    ],
)
def test_a_sliding_window_is_honoured_where_it_is_said(changes, told, window, tmp_path):
    folder = write(tmp_path / "head", {**EAGLE3, **changes}, eagle3_tensors("midlayer"))
    assert read_foreign(folder, told).head.config.sliding_window == window


_REFUSED: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "window with two readings": (EAGLE3, {"sliding_window": 9}, "say --sliding-window 9, or 0 for none"),
    "two bases": (
        EAGLE3,
        {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}},
        r"rope_theta is 10000 and 25000; say which with --rope-theta",
    ),
    "partial rotation": (
        EAGLE3,
        {"rope_parameters": {"rope_type": "default", "rope_theta": 25000.0, "partial_rotary_factor": 0.5}},
        "partial_rotary_factor",
    ),
    "last layernorm": (SPEC_FORGE, {"eagle_config": {"use_last_layernorm": False}}, "use_last_layernorm is"),
    "final state only": (
        SPEC_FORGE,
        {"eagle_config": {"use_aux_hidden_state": False}},
        "use_aux_hidden_state",
    ),
    "parallel": (SPEC_FORGE, {"eagle_config": {"parallel_draft_step": 4}}, "parallel_draft_step is 4"),
    "levels that differ": (
        {**EAGLE3, "norm_before_fc": True},
        {"eagle_config": {"norm_before_fc": False}},
        "norm_before_fc is False and True",
    ),
    "residual left open": (
        SPECULATORS,
        {"norm_before_residual": None},
        "say --norm-before-residual or --no-",
    ),
    "norm said, not there": (
        EAGLE3,
        {"fc_norm": True},
        "fc_norm is True, but the file lacks fc_norm.0.weight",
    ),
    "other kind": (
        SPECULATORS,
        {"speculators_model_type": "peagle"},
        "says peagle, the weights are those of",
    ),
    "two layers said": (EAGLE3, {"num_hidden_layers": 2}, "num_hidden_layers is 2, the weights hold 1"),
    "other act": (EAGLE3, {"hidden_act": "gelu"}, "hidden_act 'gelu'"),
    "scaled logits": (EAGLE3, {"logit_scale": 0.5}, "logit_scale is 0.5"),
    "no sizes": (EAGLE3, {"hidden_size": None}, "lacks hidden_size"),
    "other width": (EAGLE3, {"target_hidden_size": 24}, r"fc.weight is \[32, 96\], wanted \[32, 72\]"),
}


@pytest.mark.parametrize("case", _REFUSED)
def test_what_is_not_computed_or_left_open_is_refused_by_name(case, tmp_path):
    config, changes, words = _REFUSED[case]
    prefix = "layers.0" if config is SPECULATORS else "midlayer"
    folder = write(tmp_path / "head", {**config, **changes}, eagle3_tensors(prefix))
    with pytest.raises(UserError, match=words):
        read_foreign(folder)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("midlayer.mlp.experts.0.up_proj.weight", "a mixture of experts"),
        ("midlayer.mlp.up_proj.weight_scale", "quantised weights"),
        ("mask_hidden", "parallel drafting"),
        ("extra.weight", "unexpected extra.weight"),
    ],
)
def test_tensors_that_no_head_here_has_are_refused_by_name(name, words, tmp_path):
    folder = write(tmp_path / "head", EAGLE3, eagle3_tensors("midlayer") | {name: torch.ones(H)})
    with pytest.raises(UserError, match=words):
        read_foreign(folder)


@pytest.mark.parametrize("name", ["lm_head.weight", "norm.weight", "d2t", "midlayer.self_attn.k_proj.weight"])
def test_a_missing_tensor_is_refused_by_name(name, tmp_path):
    tensors = eagle3_tensors("midlayer")
    del tensors[name]
    with pytest.raises(UserError, match=name.replace(".", r"\.")):
        read_foreign(write(tmp_path / "head", EAGLE3, tensors))


def test_copies_of_the_targets_tables_must_be_the_targets(tmp_path):
    embedding = torch.randn(V, H)
    tensors = eagle1_tensors() | {"embed_tokens.weight": embedding.half(), "lm_head.weight": 2 * embedding}
    read = read_foreign(write(tmp_path / "head", EAGLE1, tensors))
    read.check_copies(embedding, 2 * embedding, "head")
    with pytest.raises(UserError, match=r"head: its lm_head\.weight is not the target's"):
        read.check_copies(embedding, embedding, "head")
    with pytest.raises(UserError, match=r"head: its embed_tokens\.weight is not the target's"):
        read.check_copies(embedding[:-1], 2 * embedding, "head")
