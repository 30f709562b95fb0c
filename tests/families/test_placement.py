"""A target spread over devices is the same target; what makes it slow is said."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from eagle_train.decoding.loop import Settings, generate, plain
from eagle_train.targets import checkpoint
from eagle_train.targets.load import load_target

from .conftest import PROMPT
from .models import family_config, save_target
from .scripted import Scripted


@pytest.mark.parametrize(
    ("places", "words"),
    [
        ({"": "cpu"}, ""),
        ({"a": 0, "b": 1}, ""),
        ({"a": 0, "b": "cpu", "c": "cpu"}, "of the target's 3 parts device_map put 2 on the cpu: every"),
        ({"a": 0, "b": "cpu", "c": "disk"}, "put 1 on the cpu and 1 on the disk: every forward waits"),
        ({"a": "cpu", "b": "disk"}, "of the target's 2 parts device_map put 1 on the disk: every forward"),
    ],
)
def test_parts_on_a_slower_device_are_said(places, words, capsys):
    model = torch.nn.Module()
    model.hf_device_map = places
    checkpoint._say_spilled(model)
    said = capsys.readouterr().err
    assert words in said
    assert said.count("\n") == bool(words)


def test_a_target_partly_on_the_disk_is_the_same_target(tiny_target_dir: Path, tmp_path: Path, capsys):
    folder = save_target(tmp_path / "target", family_config("llama2"), tiny_target_dir)
    names = ["model.embed_tokens", "model.rotary_emb", "model.norm"]
    places = dict.fromkeys([*names, *(f"model.layers.{i}" for i in range(6))], "cpu")
    places |= dict.fromkeys(["model.layers.6", "model.layers.7", "lm_head"], "disk")
    spilled = load_target(folder, dtype="fp32", device="cpu", device_map=places)
    assert "put 3 on the disk" in capsys.readouterr().err
    assert {weight.device.type for weight in spilled.model.parameters()} == {"cpu", "meta"}
    whole = load_target(folder, dtype="fp32", device="cpu")
    assert torch.equal(spilled.frozen().lm_head, whole.frozen().lm_head)
    settings = Settings(max_new_tokens=8, eos_ids=())
    wanted = plain(whole, PROMPT, settings).ids
    assert plain(spilled, PROMPT, settings).ids == wanted
    drafter = Scripted([*PROMPT, *wanted], layer_ids=(2, 7))
    assert generate(spilled, drafter, PROMPT, settings).ids == wanted
