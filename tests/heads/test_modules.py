"""Definitions: norm, rotation, fused features, the switches, further layers."""

from __future__ import annotations

import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import (
    LlamaDecoderLayer,
    LlamaRMSNorm,
    LlamaRotaryEmbedding,
    apply_rotary_pos_emb,
)

from eagle_train.errors import UserError
from eagle_train.heads.config import HeadConfig
from eagle_train.heads.norm import RMSNorm
from eagle_train.heads.rotary import Rotary, rotate

from .small import TARGET, small_frozen, small_head, softmax_attention

ROPES = [
    {"rope_type": "default", "rope_theta": 5e5},
    {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0},
    {
        "rope_type": "llama3",
        "rope_theta": 5e5,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
    {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0, "original_max_position_embeddings": 64},
]


def test_norm_equals_llamas_in_values_and_gradients():
    mine, theirs = RMSNorm(48, 1e-5), LlamaRMSNorm(48, 1e-5)
    with torch.no_grad():
        mine.weight.normal_()
        theirs.weight.copy_(mine.weight)
    x, probe = torch.randn(2, 5, 48), torch.randn(2, 5, 48)
    leaves = [x.clone().requires_grad_(), x.clone().requires_grad_()]
    outs = [mine(leaves[0]), theirs(leaves[1])]
    for out in outs:
        (out * probe).sum().backward()
    torch.testing.assert_close(outs[0], outs[1])
    torch.testing.assert_close(leaves[0].grad, leaves[1].grad)
    torch.testing.assert_close(mine.weight.grad, theirs.weight.grad)


def test_norm_gradient_is_that_of_finite_differences():
    norm = RMSNorm(6, 1e-3).double()
    assert torch.autograd.gradcheck(
        lambda x, weight: torch.func.functional_call(norm, {"weight": weight}, (x,)),
        (
            torch.randn(4, 6, dtype=torch.float64, requires_grad=True),
            torch.randn(6, dtype=torch.float64, requires_grad=True),
        ),
    )


def test_norm_of_bfloat16_is_computed_in_float32():
    norm = RMSNorm(576, 1e-5)
    x = (torch.randn(7, 576) * 300).bfloat16()
    exact = (x.double() * (x.double().square().mean(-1, keepdim=True) + 1e-5).rsqrt()).bfloat16()
    assert norm(x).dtype == torch.bfloat16
    assert torch.equal(norm(x), exact)


@pytest.mark.parametrize("rope", ROPES)
def test_rotation_equals_transformers_for_every_scaling(rope):
    config = HeadConfig.for_target({**TARGET, "rope_parameters": rope}, "eagle3")
    llama = LlamaConfig(
        hidden_size=32,
        num_attention_heads=4,
        head_dim=16,
        max_position_embeddings=256,
        rope_parameters=dict(rope),
    )
    positions = torch.tensor([0, 1, 17, 90, 255, 700])
    q = torch.randn(6, 4, 16)
    cos, sin = LlamaRotaryEmbedding(llama)(q, positions[None])
    wanted, _ = apply_rotary_pos_emb(q[None], q[None], cos, sin, unsqueeze_dim=2)
    torch.testing.assert_close(rotate(q, *Rotary(config)(positions)), wanted[0], atol=2e-6, rtol=1e-5)


def test_rotation_gradient_turns_back():
    config = HeadConfig.for_target(TARGET, "eagle3")
    q = torch.randn(3, 2, 16, dtype=torch.float64, requires_grad=True)
    angles = [x.double() for x in Rotary(config)(torch.tensor([0, 3, 40]))]
    assert torch.autograd.gradcheck(lambda x: rotate(x, *angles), (q,))


def test_rope_that_depends_on_the_length_is_refused():
    rope = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
    with pytest.raises(UserError, match="rope_type 'dynamic'"):
        Rotary(HeadConfig.for_target({**TARGET, "rope_parameters": rope}, "eagle3"))


def test_longrope_takes_the_factors_of_the_heads_context():
    short, long = [1.0] * 8, [3.0] * 8
    rope = {
        "rope_type": "longrope",
        "rope_theta": 1e4,
        "short_factor": short,
        "long_factor": long,
        "original_max_position_embeddings": 64,
    }
    frequencies = []
    for context in (64, 256):
        target = {**TARGET, "rope_parameters": rope, "max_position_embeddings": context}
        frequencies.append(Rotary(HeadConfig.for_target(target, "eagle3"))._frequencies)
    torch.testing.assert_close(frequencies[0], 3 * frequencies[1])


def test_fc_norm_norms_each_captured_layer_before_fc():
    head = small_head("eagle3", fc_norm=True)
    features = torch.randn(5, 96) * torch.tensor([1.0, 30.0, 2000.0]).repeat_interleave(32)
    parts = []
    for i in range(3):
        x = features[:, 32 * i : 32 * (i + 1)]
        parts.append(x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt() * head.fc_norm[i].weight)
    torch.testing.assert_close(head.start(features), torch.cat(parts, -1) @ head.fc.weight.T)
    plain = small_head("eagle3")
    torch.testing.assert_close(plain.start(features), features @ plain.fc.weight.T)


def test_norm_output_feeds_back_the_normed_output():
    out = torch.randn(5, 32)
    head = small_head("eagle3", norm_output=True)
    torch.testing.assert_close(head.carry(out), head.norm(out))
    assert torch.equal(small_head("eagle3").carry(out), out)
    torch.testing.assert_close(head.logits(out, small_frozen()), head.norm(out) @ head.lm_head.weight.T)


def _run(head, hidden, embeds, rows=None):
    def attend(layer, q, k, v):
        at = torch.arange(len(k)) if len(q) == len(k) else rows
        return softmax_attention(q, k, v, torch.arange(len(k)) <= at[:, None])

    return head(hidden, embeds, torch.arange(len(hidden)), attend, rows)


def test_first_layer_reads_the_normed_embedding_beside_the_normed_hidden():
    head = small_head("eagle3")
    hidden, embeds = torch.randn(6, 32), torch.randn(6, 32)
    layer = head.midlayer
    inputs = torch.cat([layer.input_layernorm(embeds), layer.hidden_norm(hidden)], -1)
    cos, sin = head.rotary(torch.arange(6))
    q, k, v = (getattr(layer.self_attn, f"{n}_proj")(inputs).unflatten(-1, (-1, 16)) for n in "qkv")
    seen = torch.ones(6, 6, dtype=torch.bool).tril()
    attended = softmax_attention(rotate(q, cos, sin), rotate(k, cos, sin), v, seen)
    residual = hidden + layer.self_attn.o_proj(attended.flatten(-2))
    wanted = residual + layer.mlp(layer.post_attention_layernorm(residual))
    torch.testing.assert_close(_run(head, hidden, embeds), wanted)


@pytest.mark.parametrize("kind", ["eagle1", "eagle3"])
def test_further_layers_are_ordinary_llama_layers(kind):
    head, alone = small_head(kind, num_hidden_layers=2), small_head(kind)
    further = list(head.layers.children())[-1]
    alone.load_state_dict(head.state_dict(), strict=False)
    config = LlamaConfig(
        **{k: v for k, v in TARGET.items() if k != "num_hidden_layers"}, attn_implementation="eager"
    )
    llama = LlamaDecoderLayer(config, layer_idx=0)
    llama.load_state_dict(further.state_dict())
    hidden, embeds = torch.randn(7, 32), torch.randn(7, 32)
    below = _run(alone, hidden, embeds)
    mask = torch.full((7, 7), float("-inf")).triu(1)[None, None]
    angles = LlamaRotaryEmbedding(config)(below[None], torch.arange(7)[None])
    wanted = llama(below[None], attention_mask=mask, position_embeddings=angles)
    torch.testing.assert_close(_run(head, hidden, embeds), wanted.squeeze(0), atol=1e-5, rtol=1e-4)


def test_norms_on_queries_and_keys_are_those_of_qwen3():
    from transformers import Qwen3Config
    from transformers.models.qwen3.modeling_qwen3 import Qwen3DecoderLayer

    head = small_head("eagle3", num_hidden_layers=2, qk_norm=True)
    further = list(head.layers.children())[-1]
    config = Qwen3Config(
        **{k: v for k, v in TARGET.items() if k != "num_hidden_layers"}, attn_implementation="eager"
    )
    qwen = Qwen3DecoderLayer(config, layer_idx=0)
    qwen.load_state_dict(further.state_dict())
    below = torch.randn(7, 32)
    mask = torch.full((7, 7), float("-inf")).triu(1)[None, None]
    cos, sin = head.rotary(torch.arange(7))
    doubled = (torch.cat([cos, cos], -1)[None], torch.cat([sin, sin], -1)[None])
    wanted = qwen(below[None], attention_mask=mask, position_embeddings=doubled)

    def attend(layer, q, k, v):
        return softmax_attention(q, k, v, torch.ones(7, 7, dtype=torch.bool).tril())

    got = further(further.input_layernorm(below), below, (cos, sin), attend)
    torch.testing.assert_close(got, wanted.squeeze(0), atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("kind", ["eagle1", "eagle3"])
@pytest.mark.parametrize("layers", [1, 2])
def test_chosen_rows_equal_those_of_the_whole(kind, layers):
    head = small_head(kind, num_hidden_layers=layers)
    hidden, embeds, rows = torch.randn(8, 32), torch.randn(8, 32), torch.tensor([1, 4, 7])
    torch.testing.assert_close(_run(head, hidden, embeds, rows), _run(head, hidden, embeds)[rows])


def test_eagle1_has_no_input_norm_and_no_final_norm():
    head, frozen = small_head("eagle1"), small_frozen()
    assert not [n for n, _ in head.named_parameters() if "norm" in n and "post_attention" not in n]
    out = torch.randn(4, 32)
    torch.testing.assert_close(head.logits(out, frozen), out @ frozen.lm_head.T)
    assert torch.equal(head.target_ids(torch.tensor([3, 59])), torch.tensor([3, 59]))


def test_draft_ids_are_translated_to_target_ids():
    head = small_head("eagle3")
    assert torch.equal(head.target_ids(torch.arange(40)), head.draft_ids)
    assert head.in_draft.nonzero().flatten().tolist() == head.draft_ids.tolist()
