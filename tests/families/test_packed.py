"""Weights packed as integers: layers are read by what they compute, not by a weight they lack."""

from __future__ import annotations

import pytest
import torch

from eagle_train.decoding.loop import Settings, generate, plain
from eagle_train.errors import UserError
from eagle_train.targets.capture import FeatureTap
from eagle_train.targets.labels import labels
from eagle_train.targets.load import Target
from eagle_train.targets.packed import dense, dense_output

from .conftest import PROMPT
from .models import family_config, random_model
from .scripted import Scripted


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
