"""The benchmarks of decoding measure the shipped loops: their rounds, on the same texts."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from eagle_train.decoding.drafters import HeadDrafter
from eagle_train.decoding.loop import Settings, generate
from eagle_train.decoding.shapes import Chain, Dynamic
from eagle_train.heads.config import HeadConfig
from eagle_train.heads.disk import build_head
from eagle_train.targets.load import Target, load_target

PROMPTS = [[5, 17, 250, 33], [8, 121]]
SETTINGS = Settings(max_new_tokens=8, eos_ids=())


@pytest.fixture(scope="module")
def target(tiny_target_dir: Path) -> Target:
    return load_target(str(tiny_target_dir), dtype="fp32", device="cpu")


def head_for(target: Target):
    torch.manual_seed(0)
    return build_head(HeadConfig.for_target(target.config.to_dict(), "eagle3"))


@pytest.mark.parametrize(("shape", "nodes"), [(Chain(3), 4), (Dynamic(12, 4, 3), 12)])
def test_a_round_is_measured_as_it_is_shipped(script, target, shape, nodes):
    found = script("bench_round").measure(head_for(target), target, shape, PROMPTS, SETTINGS)
    drafter = HeadDrafter(head_for(target), target, shape)
    rounds = sum(len(generate(target, drafter, prompt, SETTINGS).accepted) for prompt in PROMPTS)
    assert found["rounds"] == rounds - len(PROMPTS), "a text's last round has no end to measure to"
    assert found["tokens_of_a_forward"] == nodes
    assert 0 < found["head_ms"] < found["round_ms"]
    assert found["forward_ms"] > 0
    assert found["ratio"] > 0


def test_batches_of_every_size_give_the_same_answers(script, target):
    found = script("bench_batch").measure(head_for(target), target, PROMPTS, [1, 2], SETTINGS)
    assert [(one["size"], one["equal"]) for one in found] == [(1, True), (2, True)] * 3
    assert found[0]["times_plain"] == 1
    assert all(one["times_plain"] == one["rate"] / found[0]["rate"] > 0 for one in found)
