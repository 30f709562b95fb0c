"""Which parameter goes to which optimizer, and the learning rate over a run."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import nn

from eagle_train.config import OptimRecipe, ScheduleRecipe
from eagle_train.errors import UserError
from eagle_train.training.average import Average
from eagle_train.training.optim import Optimizers, lr_factor


def head() -> nn.Module:
    module = nn.Module()
    module.fc = nn.Linear(6, 4, bias=True)
    module.midlayer = nn.Linear(4, 4, bias=False)
    module.norm = nn.LayerNorm(4, bias=False)
    module.lm_head = nn.Linear(4, 9, bias=False)
    return module


def groups(optimizers: Optimizers) -> dict[str, set[str]]:
    return {
        type(part).__name__: {optimizers.names[p] for g in part.param_groups for p in g["params"]}
        for part in optimizers.parts
    }


def test_muon_takes_the_matrices_between_hidden_states_and_adamw_the_rest():
    assert groups(Optimizers(head(), OptimRecipe(name="muon"))) == {
        "Muon": {"fc.weight", "midlayer.weight"},
        "AdamW": {"fc.bias", "norm.weight", "lm_head.weight"},
    }


def test_adamw_takes_everything():
    assert groups(Optimizers(head(), OptimRecipe())) == {
        "AdamW": {"fc.weight", "fc.bias", "midlayer.weight", "norm.weight", "lm_head.weight"}
    }


def step(module: nn.Module, optimizers: Optimizers, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for parameter in module.parameters():
        parameter.grad = torch.randn(parameter.shape, generator=generator)
    optimizers.step(0.5)
    optimizers.zero()


@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_state_by_name_restores_the_optimizer_exactly(name):
    recipe = OptimRecipe(name=name, lr=0.1, weight_decay=0.1)
    one, two = head(), head()
    first, second = Optimizers(one, recipe), Optimizers(two, recipe)
    step(one, first, 1)
    two.load_state_dict(one.state_dict())
    second.load({key: value.clone() for key, value in first.state().items()}, "there")
    assert all(value.dtype == torch.float32 for value in first.state().values())
    step(one, first, 2)
    step(two, second, 2)
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), two.parameters(), strict=True))


def test_state_of_another_head_is_refused():
    with pytest.raises(UserError, match="there: optimizer state for unknown parameter 'gone'"):
        Optimizers(head(), OptimRecipe()).load({"gone/step": torch.zeros(())}, "there")


def test_step_multiplies_each_peak_and_clip_measures_the_whole_gradient():
    module = head()
    optimizers = Optimizers(module, OptimRecipe(lr=0.2, clip_norm=0.5))
    for parameter in module.parameters():
        parameter.grad = torch.ones_like(parameter)
    size = sum(p.numel() for p in module.parameters())
    assert optimizers.clip() == pytest.approx(math.sqrt(size))
    after = math.sqrt(sum(float(p.grad.square().sum()) for p in module.parameters()))
    assert after == pytest.approx(0.5, rel=1e-4)
    optimizers.step(0.25)
    assert optimizers.parts[0].param_groups[0]["lr"] == pytest.approx(0.05)
    optimizers.step(1.0)
    assert optimizers.parts[0].param_groups[0]["lr"] == pytest.approx(0.2)


def test_no_clipping_at_zero():
    module = head()
    optimizers = Optimizers(module, OptimRecipe(clip_norm=0.0))
    for parameter in module.parameters():
        parameter.grad = torch.full_like(parameter, 100.0)
    optimizers.clip()
    assert all(bool((p.grad == 100).all()) for p in module.parameters())


def test_schedule_by_value():
    schedule = ScheduleRecipe("linear", warmup_steps=4, final=0.0)
    got = [lr_factor(schedule, step, 12, 0.0) for step in range(12)]
    assert got == pytest.approx([0.25, 0.5, 0.75, 1, 1, 7 / 8, 6 / 8, 5 / 8, 4 / 8, 3 / 8, 2 / 8, 1 / 8])
    cosine = replace(schedule, shape="cosine", final=0.1)
    assert lr_factor(cosine, 8, 12, 0.0) == pytest.approx(0.55)
    assert lr_factor(replace(schedule, shape="constant"), 11, 12, 0.0) == 1
    assert lr_factor(replace(schedule, warmup_steps=0), 0, 12, 0.0) == 1
    stable = ScheduleRecipe("wsd", warmup_steps=0, final=0.1, decay_share=0.25)
    got = [lr_factor(stable, step, 8, 0.0) for step in range(8)]
    assert got == pytest.approx([1, 1, 1, 1, 1, 1, 1, 0.55])


def test_the_clock_shortens_the_schedule_when_it_is_ahead_of_the_steps():
    schedule = ScheduleRecipe("linear", warmup_steps=0)
    assert lr_factor(schedule, 50, None, 0.75) == pytest.approx(0.25)
    assert lr_factor(schedule, 50, 100, 0.75) == pytest.approx(0.25)
    assert lr_factor(schedule, 50, 100, 0.25) == pytest.approx(0.5)
    assert lr_factor(schedule, 50, None, 1.3) == 0


def test_the_average_follows_the_weights_and_takes_their_place_for_a_while():
    module = head()
    average = Average(module, 0.2)
    start = module.fc.weight.detach().clone()
    with torch.no_grad():
        module.fc.weight.add_(1.0)
    average.update()  # decay min(0.2, 2 / 11)
    with torch.no_grad():
        module.fc.weight.add_(1.0)
    average.update()  # decay min(0.2, 3 / 12)
    first = start + 9 / 11
    wanted = 0.2 * first + 0.8 * (start + 2)
    trained = module.fc.weight.detach().clone()
    with average.in_place():
        torch.testing.assert_close(module.fc.weight.detach(), wanted)
    assert torch.equal(module.fc.weight, trained)
    assert torch.equal(average.state()["trained/fc.weight"], trained)
