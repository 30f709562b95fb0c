"""What a family cannot do is refused in one line, before work that would be lost."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from eagle_train.decoding.batch_reader import BatchReader
from eagle_train.decoding.reader import TargetReader
from eagle_train.errors import UserError
from eagle_train.targets.capture import FeatureTap
from eagle_train.targets.load import Target
from eagle_train.targets.survey import survey

from .conftest import PROMPT
from .models import LAYERS, SIZES, family_config, longrope, random_model, save_target

_EXPERTS = {"num_local_experts": 4, "intermediate_size_mlp": 48}
_MPT = {"d_model": 32, "n_heads": 4, "n_layers": 8}


def other_config(name: str, **settings):
    import transformers

    sizes = {key: SIZES[key] for key in SIZES if key not in ("max_position_embeddings", "bos_token_id")}
    return getattr(transformers, name)(**{**sizes, **settings})


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (("BloomConfig", {"n_layer": 8, "n_head": 4}), "bloom places a token by its row in the cache"),
        (("FalconConfig", {"alibi": True}), "falcon places a token by its row in the cache"),
        (("MptConfig", _MPT), "mpt places a token by its row in the cache"),
        (
            (
                "GPTNeoConfig",
                {"num_layers": 8, "num_heads": 4, "attention_types": [[["global", "local"], 4]]},
            ),
            "gpt_neo places a token by its row in the cache",
        ),
        (("Llama4TextConfig", {"head_dim": 8, **_EXPERTS}), "has layers of kind chunked_attention"),
        (("MiniMaxConfig", {"head_dim": 8, "num_local_experts": 4}), "has layers of kind linear_attention"),
        (("MambaConfig", {}), "has layers of kind linear_attention"),
    ],
    ids=["bloom", "falcon-alibi", "mpt", "gpt-neo", "llama4", "minimax", "mamba"],
)
def test_families_that_cannot_take_guesses_back_are_refused_before_decoding(config, words):
    name, settings = config
    target = Target("org/model", None, random_model(other_config(name, **settings)))
    for read in (lambda: TargetReader(target, ()), lambda: BatchReader(target, (), 4)):
        with pytest.raises(UserError) as caught:
            read()
        assert str(caught.value).startswith(f"org/model: {words}")
        assert "\n" not in str(caught.value)


def test_families_that_cannot_be_decoded_may_still_give_features():
    target = Target("llama4", None, random_model(other_config("Llama4TextConfig", head_dim=8, **_EXPERTS)))
    ids = torch.tensor([PROMPT])
    with FeatureTap(target, (2, 4, 5)) as tap, torch.no_grad():
        seen = tap.forward(ids)
        own = target.model(input_ids=ids, output_hidden_states=True, use_cache=False)
    assert torch.equal(seen.aux, torch.cat([own.hidden_states[k] for k in (2, 4, 5)], dim=-1))
    assert torch.equal(target.logits(seen.last), own.logits)


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (
            lambda: family_config("llama2", rope_parameters={"rope_type": "dynamic", "factor": 4.0}),
            "head: rope_type 'dynamic' is not supported, wanted one of default, linear,",
        ),
        (
            lambda: other_config("Gemma3nTextConfig", intermediate_size=[48] * LAYERS),
            "the target's config: intermediate_size: got [48, 48, 48, 48, 48, 48, 48, 48], wanted one number",
        ),
        (lambda: longrope(40), "rows: row "),
    ],
    ids=["dynamic", "gemma3n", "longrope"],
)
def test_families_that_no_head_can_be_trained_for_are_refused_before_extraction(
    config, words, tiny_target_dir: Path, few_conversations: Path, tmp_path: Path
):
    from eagle_train.data.prepare import prepare

    folder = tmp_path / "target"
    save_target(folder, family_config("llama2"), tiny_target_dir)
    config().save_pretrained(folder)  # the weights are never looked at
    prepare([str(few_conversations)], str(folder), tmp_path / "rows")
    with pytest.raises(UserError) as caught:
        survey(tmp_path / "rows", str(folder), None, dtype="fp32", device="cpu")
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)
