"""A checkpoint's settings are told apart, and of one that also sees the text part is read."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from eagle_train.decoding.loop import Settings, generate, plain
from eagle_train.targets.capture import FeatureTap
from eagle_train.targets.load import Target, load_target

from .conftest import PROMPT
from .models import LAYERS, family_config, random_model
from .scripted import Scripted


@pytest.mark.parametrize(
    ("family", "setting"),
    [
        ("granite", {"embedding_multiplier": 2.5}),
        ("granite", {"logits_scaling": 4.0}),
        ("gemma2", {"attn_logit_softcapping": 6.0}),
        ("olmo3", {"layer_types": ["full_attention"] * LAYERS}),
        ("olmo", {"clip_qkv": 3.0}),
    ],
)
def test_the_fingerprint_sees_settings_that_change_features(family, setting):
    """The same weights under two configs are two targets."""
    prints = {
        Target(family, None, random_model(family_config(family, **s))).fingerprint for s in ({}, setting)
    }
    assert len(prints) == 2


def test_a_model_that_also_sees_is_read_as_its_text_part(tmp_path: Path):
    """Gemma 3 from 4B on: the language model is a part of the checkpoint, its config a part of the config."""
    import transformers

    vision = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = transformers.Gemma3Config(
        text_config=family_config("gemma3").to_dict(),
        vision_config={**vision, "image_size": 28, "patch_size": 14},
        mm_tokens_per_image=4,
        image_token_index=299,
        dtype="float32",
    )
    random_model(config).save_pretrained(tmp_path)
    target = load_target(tmp_path, dtype="fp32", device="cpu")
    settings = Settings(max_new_tokens=12, eos_ids=())
    wanted = plain(target, PROMPT, settings).ids
    text = torch.tensor([[*PROMPT, *wanted]])
    with FeatureTap(target, (2, 4, 5)) as tap, torch.no_grad():
        seen = tap.forward(text)
        own = target.model(input_ids=text, output_hidden_states=True, use_cache=False)
    assert torch.equal(seen.aux, torch.cat([own.hidden_states[k] for k in (2, 4, 5)], dim=-1))
    torch.testing.assert_close(target.frozen().logits(seen.last), own.logits)
    assert wanted == own.logits[0, len(PROMPT) - 1 : -1].argmax(-1).tolist()
    assert generate(target, Scripted(text[0].tolist(), (2, 5)), PROMPT, settings).ids == wanted
