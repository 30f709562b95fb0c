"""Every family: its features and labels are the model's own, and a head on them decodes without loss."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from eagle_train.decoding.batch import Job, generate_together
from eagle_train.decoding.drafters import HeadDrafter
from eagle_train.decoding.loop import Settings, generate, plain
from eagle_train.decoding.sampling import SeededChance
from eagle_train.decoding.shapes import Chain, Dynamic
from eagle_train.export.export import export
from eagle_train.heads.disk import EagleHead, load_head
from eagle_train.shards.frozen_target import FrozenTarget
from eagle_train.shards.plan import label_positions
from eagle_train.shards.reader import open_shards
from eagle_train.targets.capture import FeatureTap
from eagle_train.targets.load import Target

from .conftest import PROMPT
from .models import FAMILIES, LAYERS
from .scripted import Scripted

# what fp32 may round of a position's largest value: gpt-oss makes 8e-5 of one rounding of its embeddings
ROUNDED = {"gpt-oss": 1e-4}

pytestmark = pytest.mark.parametrize("family", FAMILIES)


@torch.inference_mode()
def own_forward(target: Target, ids: list[int]):
    """transformers' own forward over a whole text: no cache, its own masks and windows."""
    return target.model(input_ids=torch.tensor([ids]), output_hidden_states=True, use_cache=False)


def test_features_are_the_layers_and_logits_the_models_own(trained, family):
    made = trained(family)
    own = own_forward(made.target, PROMPT)
    with FeatureTap(made.target, range(LAYERS)) as tap:
        seen = tap.forward(torch.tensor([PROMPT]))
    for k, stream in enumerate(seen.aux.split(made.target.hidden_size, dim=-1)):
        assert torch.equal(stream, own.hidden_states[k]), f"layer {k}"
    assert torch.equal(seen.last, own.hidden_states[-1])
    assert torch.equal(made.target.logits(seen.last), own.logits)
    rebuilt = FrozenTarget.load(made.shards).logits(seen.last)
    torch.testing.assert_close(rebuilt, own.logits, rtol=1e-6, atol=1e-6)
    assert own.logits.abs().max() > 0.5


def test_shards_hold_the_layers_and_the_models_own_labels(trained, family):
    made = trained(family)
    shards = open_shards(made.shards)
    for number in (0, len(shards) - 1):
        row = shards.read(number)
        own = own_forward(made.target, row.input_ids.tolist())
        wanted = torch.cat([own.hidden_states[k][0] for k in (2, LAYERS // 2, LAYERS - 3)], dim=-1)
        rounded = (row.aux - wanted).abs() / wanted.abs().amax(-1, keepdim=True)
        assert rounded.max() < ROUNDED.get(family, 1e-5)
        logits = own.logits[0, label_positions(row.spans)]
        assert torch.equal(row.label_argmax, logits.argmax(-1))
        torch.testing.assert_close(row.label_lse, logits.logsumexp(-1), rtol=1e-5, atol=1e-5)


def test_rows_kept_of_a_tree_are_those_of_the_text_read_at_once(trained, family):
    """Right guesses stand on the last branches of a tree, behind wrong ones, in two rounds of three."""
    target, settings = trained(family).target, Settings(max_new_tokens=22, eos_ids=())
    wanted = plain(target, PROMPT, settings).ids
    text = [*PROMPT, *wanted]
    own = own_forward(target, text)
    assert wanted == own.logits[0, len(PROMPT) - 1 : -1].argmax(-1).tolist()
    assert len(set(wanted)) > 3
    drafter = Scripted(text, layer_ids=(2, 5))
    made = generate(target, drafter, PROMPT, settings)
    assert made.ids == wanted
    assert max(made.accepted) == 3
    aux = torch.cat([rows.aux for rows in drafter.observed])
    last = torch.cat([rows.last for rows in drafter.observed])
    assert len(last) > len(PROMPT) + 12
    states = [own.hidden_states[k][0, : len(last)] for k in (2, 5, -1)]
    torch.testing.assert_close(aux, torch.cat(states[:2], dim=-1), rtol=1e-3, atol=1e-4)
    torch.testing.assert_close(last, states[2], rtol=1e-3, atol=1e-4)


def test_texts_read_together_are_answered_as_alone(trained, family):
    """Ragged prompts, on both sides of the windows, with ragged acceptance."""
    target, settings = trained(family).target, Settings(max_new_tokens=10, eos_ids=())
    prompts = [PROMPT, PROMPT[:3], PROMPT[5:14]]
    wanted = [plain(target, prompt, settings).ids for prompt in prompts]
    for drafters in (
        [Scripted([*p, *ids], (2, 5)) for p, ids in zip(prompts, wanted, strict=True)],
        [None] * 3,
    ):
        pairs = zip(prompts, drafters, strict=True)
        jobs = [Job(prompt, drafter, SeededChance(0)) for prompt, drafter in pairs]
        assert [one.ids for one in generate_together(target, jobs, settings, 3)] == wanted


@pytest.mark.parametrize("shape", [Chain(3), Dynamic(20, 4, 4)], ids=["chain", "tree"])
def test_a_trained_head_decodes_as_the_target_alone(trained, family, shape):
    made, settings = trained(family), Settings(max_new_tokens=10, eos_ids=())
    drafter = HeadDrafter(made.head, made.target, shape)
    got = generate(made.target, drafter, PROMPT, settings)
    assert got.ids == plain(made.target, PROMPT, settings).ids


def test_an_exported_head_is_the_trained_one(trained, family, tmp_path: Path):
    made = trained(family)
    export(made.run, tmp_path / "head", engine="vllm", dtype="keep")
    head = load_head(tmp_path / "head")
    assert isinstance(head, EagleHead)
    frozen = made.target.frozen()
    aux = torch.randn(5, 3 * 32, generator=torch.Generator().manual_seed(0))
    guesses = [h.logits(h.start(aux), frozen) for h in (head, made.head)]
    assert torch.equal(*guesses)
    assert all(torch.equal(a, b) for a, b in zip(head.parameters(), made.head.parameters(), strict=True))
