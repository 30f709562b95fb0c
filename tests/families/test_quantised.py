"""A target with torchao's int8 weights, on a CPU: features, labels, training and decoding are its own."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from eagle_train.decoding.drafters import HeadDrafter
from eagle_train.decoding.loop import Settings, generate, plain
from eagle_train.decoding.shapes import Chain, Dynamic
from eagle_train.export.export import export
from eagle_train.heads.disk import load_head
from eagle_train.shards.frozen_target import FrozenTarget
from eagle_train.shards.plan import label_positions
from eagle_train.shards.reader import open_shards
from eagle_train.targets.load import load_target
from eagle_train.targets.packed import quantisation

from .conftest import PROMPT, Trained, train_on
from .models import LAYERS, family_config, save_target
from .quantised import held, is_quantised, planned
from .scripted import Scripted

quantization = pytest.importorskip("torchao.quantization", reason="torchao is not installed")


@pytest.fixture(scope="module", params=["llama3", "gemma2", "phi3"])
def made(request, tmp_path_factory, tiny_target_dir: Path, few_conversations: Path) -> Trained:
    """A head trained on a quantised target; its output map is quantised too, save for tied ones."""
    from transformers import TorchAoConfig

    folder = tmp_path_factory.mktemp(request.param)
    config = family_config(request.param)
    int8 = TorchAoConfig(
        quantization.Int8WeightOnlyConfig(version=2),
        include_input_output_embeddings=not config.tie_word_embeddings,
    )
    target = save_target(folder / "target", config, tiny_target_dir, int8)
    return train_on(target, few_conversations, folder)


@torch.inference_mode()
def test_features_and_labels_are_those_of_the_quantised_weights(made: Trained):
    target, shards = made.target, open_shards(made.shards)
    assert is_quantised(target.layers[3].self_attn.o_proj.weight)
    whole = load_target(Path(target.name) / "whole", dtype="fp32", device="cpu")
    row = shards.read(0)
    ids = row.input_ids[None]
    own = target.model(input_ids=ids, output_hidden_states=True, use_cache=False)
    wanted = torch.cat([own.hidden_states[k][0] for k in (2, LAYERS // 2, LAYERS - 3)], dim=-1)
    torch.testing.assert_close(row.aux, wanted, rtol=1e-4, atol=1e-4)
    logits = own.logits[0, label_positions(row.spans)]
    assert torch.equal(row.label_argmax, logits.argmax(-1))
    torch.testing.assert_close(row.label_lse, logits.logsumexp(-1), rtol=1e-5, atol=1e-5)
    other = whole.model(input_ids=ids, output_hidden_states=True, use_cache=False)
    assert (other.hidden_states[5] - own.hidden_states[5]).abs().max() > 1e-3


@torch.inference_mode()
def test_the_frozen_target_is_dense_and_gives_the_quantised_models_logits(made: Trained):
    frozen = FrozenTarget.load(made.shards)
    own = made.target.model(input_ids=torch.tensor([PROMPT]), output_hidden_states=True, use_cache=False)
    assert not is_quantised(frozen.lm_head)
    torch.testing.assert_close(frozen.logits(own.hidden_states[-1]), own.logits, rtol=1e-4, atol=1e-5)
    assert is_quantised(made.target.lm_head.weight) is (made.target.config.model_type == "phi3")


def test_the_fingerprint_tells_the_quantised_target_from_the_whole_one(made: Trained):
    whole = load_target(Path(made.target.name) / "whole", dtype="fp32", device="cpu")
    again = load_target(made.target.name, dtype="fp32", device="cpu")
    assert made.target.fingerprint == again.fingerprint != whole.fingerprint


def test_memory_is_planned_as_the_weights_are_stored(made: Trained):
    whole = load_target(Path(made.target.name) / "whole", dtype="fp32", device="cpu")
    assert planned(made.target.name) == held(made.target.model) < 0.7 * held(whole.model)
    assert planned(whole.name) == held(whole.model)
    assert quantisation(made.target.model.config) == "torchao"


def test_trees_are_read_as_the_text_alone(made: Trained):
    settings = Settings(max_new_tokens=22, eos_ids=())
    wanted = plain(made.target, PROMPT, settings).ids
    got = generate(made.target, Scripted([*PROMPT, *wanted], (2, 5)), PROMPT, settings)
    assert got.ids == wanted
    assert max(got.accepted) == 3


@pytest.mark.parametrize("shape", [Chain(3), Dynamic(20, 4, 4)], ids=["chain", "tree"])
def test_a_trained_head_decodes_as_the_quantised_target_alone(made: Trained, shape, tmp_path: Path):
    settings = Settings(max_new_tokens=10, eos_ids=())
    export(made.run, tmp_path / "head", engine="vllm", dtype="keep")
    drafter = HeadDrafter(load_head(tmp_path / "head"), made.target, shape)
    assert generate(made.target, drafter, PROMPT, settings).ids == plain(made.target, PROMPT, settings).ids
