"""What --deepspeed refuses; that it trains as one process does is in tests/distributed."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest
import torch

from eagle_train.config import OptimRecipe
from eagle_train.errors import UserError
from eagle_train.training import zero
from eagle_train.training.dry_run import dry_run


@pytest.mark.parametrize("name", zero.STAGES)
def test_the_built_in_stages_are_read(name):
    assert zero.read_zero_config(name)["zero_optimization"]["stage"] == int(name[-1])


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ({}, "zero_optimization: got None, wanted settings with a stage"),
        ({"zero_optimization": {"stage": 0}}, "zero_optimization.stage: got 0"),
        (
            {"zero_optimization": {"stage": 2}, "optimizer": {"type": "Adam"}},
            "optimizer: the recipe decides that",
        ),
        (
            {"zero_optimization": {"stage": 2}, "gradient_clipping": 5.0},
            "gradient_clipping: the recipe decides that (optim.clip_norm); remove it",
        ),
        (
            {"zero_optimization": {"stage": 2}, "bf16": {"enabled": True}},
            "bf16: the recipe decides that (run.precision)",
        ),
        ({"zero_optimization": 2}, "zero_optimization: got 2, wanted settings with a stage of 1, 2 or 3"),
        ([1], "holds a JSON list, wanted an object"),
        (None, "not found; give zero2 or zero3, or the path of a DeepSpeed JSON file"),
    ],
)
def test_a_file_that_does_not_do_is_one_line(value, words, tmp_path):
    file = tmp_path / "mine.json"
    if value is not None:
        file.write_text(json.dumps(value))
    with pytest.raises(UserError) as caught:
        zero.read_zero_config(str(file))
    assert str(file) in str(caught.value)
    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("recipe", "words"),
    [
        (OptimRecipe(name="muon"), "optim.name muon needs whole matrices"),
        (OptimRecipe(ema=0.9), "keeps no average of the weights"),
    ],
)
def test_what_needs_whole_weights_is_refused(recipe, words, tmp_path, train_tiny):
    settings = [f"optim.name={recipe.name}", f"optim.ema={recipe.ema}"]
    with pytest.raises(UserError, match=words):
        train_tiny("run", *settings, deepspeed="zero2")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("change", "words"), [("optim.name=muon", "muon needs"), ("optim.ema=0.9", "average")]
)
def test_a_rehearsal_refuses_it_too(change, words, tiny, tiny_shards_dir):
    with pytest.raises(UserError, match=words):
        dry_run(tiny_shards_dir, tiny(change), deepspeed="zero2", show=False)


@pytest.mark.parametrize("key", [None, "exp_avg"])
def test_stage_3_takes_equal_shares_of_a_tensor_that_the_processes_do_not_divide(key, monkeypatch):
    utils = pytest.importorskip("deepspeed").utils
    taken = []
    name = "safe_set_local_fp32_param" if key is None else "safe_set_local_optimizer_state"
    monkeypatch.setattr(utils, name, lambda _, value, *given: taken.append((value.tolist(), given)))
    parameter = SimpleNamespace(ds_tensor=torch.empty(3))  # of seven numbers on three processes
    for rank in range(3):
        engine = zero.ZeroEngine.__new__(zero.ZeroEngine)
        engine._stage, engine.processes = 3, SimpleNamespace(rank=rank, world=3)
        engine._put(parameter, torch.arange(1.0, 8.0), key)
    given = () if key is None else (key,)
    assert taken == [([1, 2, 3], given), ([4, 5, 6], given), ([7, 0, 0], given)]
