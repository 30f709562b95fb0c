"""HeadConfig: what comes from the target, what config.json says to engines, what is refused."""

from __future__ import annotations

import json

import pytest

from eagle_train.errors import UserError
from eagle_train.heads.config import HeadConfig, default_layers
from eagle_train.heads.rope_settings import rope_of

from .small import TARGET

YARN = {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0, "original_max_position_embeddings": 64}


def test_head_takes_its_shape_from_the_target():
    config = HeadConfig.for_target(TARGET, "eagle3", draft_vocab_size=40)
    assert (config.head_dim, config.num_key_value_heads, config.rms_norm_eps) == (16, 2, 1e-5)
    assert config.feature_layers == (2, 4, 5)
    assert config.feature_width == 96
    assert config.max_position_embeddings == 256
    assert HeadConfig.for_target(TARGET, "eagle1").feature_width == 32


def test_default_layers_need_seven_target_layers():
    assert default_layers(7) == (2, 3, 4)
    with pytest.raises(UserError, match="target has 6 layers"):
        HeadConfig.for_target({**TARGET, "num_hidden_layers": 6}, "eagle3")
    shallow = HeadConfig.for_target({**TARGET, "num_hidden_layers": 6}, "eagle3", feature_layers=(1, 3, 6))
    assert shallow.feature_layers == (1, 3, 6)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"fc_nrm": True}, "did you mean 'fc_norm'"),
        ({"feature_layers": (2, 4, 9)}, r"the target has 8 layers"),
        ({"feature_layers": (4, 2)}, "low to high"),
        ({"feature_layers": (-1, 2)}, "0 or more"),
        ({"draft_vocab_size": 61}, "1 to the target's 60"),
        ({"num_key_value_heads": 3}, "wanted a divisor"),
        ({"num_hidden_layers": 0}, "1 or more"),
        ({"hidden_act": "gelu"}, "only silu"),
    ],
)
def test_impossible_settings_are_refused_in_one_line(settings, words):
    with pytest.raises(UserError, match=words):
        HeadConfig.for_target(TARGET, "eagle3", **settings)


@pytest.mark.parametrize(
    "settings", [{"draft_vocab_size": 40}, {"fc_norm": True}, {"norm_output": True}, {"feature_layers": (1,)}]
)
def test_eagle1_refuses_eagle3_settings(settings):
    with pytest.raises(UserError, match=r"eagle1|eagle3"):
        HeadConfig.for_target(TARGET, "eagle1", **settings)


def test_config_json_names_the_layers_for_both_engines():
    value = HeadConfig.for_target(TARGET, "eagle3", draft_vocab_size=40, fc_norm=True).to_json()
    assert value["architectures"] == ["LlamaForCausalLMEagle3"]
    assert value["eagle_aux_hidden_state_layer_ids"] == [2, 4, 5]
    assert value["eagle_config"] == {
        "use_aux_hidden_state": True,
        "eagle_aux_hidden_state_layer_ids": [1, 3, 4],
    }
    assert value["num_aux_hidden_states"] == 3
    assert value["draft_vocab_size"] == 40
    assert value["vocab_size"] == 60
    assert "target_hidden_size" not in value
    assert value["fc_norm"] is True
    assert value["norm_output"] is False
    assert value["tie_word_embeddings"] is False
    assert value["max_position_embeddings"] == 256
    assert value["dtype"] == value["torch_dtype"] == "float32"


def test_the_embedding_as_a_feature_cannot_be_said_in_sglang_ids():
    value = HeadConfig.for_target(TARGET, "eagle3", feature_layers=(0, 3, 6)).to_json()
    assert value["eagle_aux_hidden_state_layer_ids"] == [0, 3, 6]
    assert "eagle_aux_hidden_state_layer_ids" not in value["eagle_config"]


def test_rope_is_written_for_old_and_new_readers():
    plain = HeadConfig.for_target(TARGET, "eagle3").to_json()
    assert (plain["rope_theta"], plain["rope_scaling"]) == (10000.0, None)
    assert plain["rope_parameters"] == {"rope_type": "default", "rope_theta": 10000.0}
    scaled = HeadConfig.for_target({**TARGET, "rope_parameters": YARN}, "eagle3").to_json()
    assert scaled["rope_theta"] == 1e6
    assert scaled["rope_scaling"] == {k: v for k, v in YARN.items() if k != "rope_theta"}
    assert scaled["rope_parameters"] == YARN


@pytest.mark.parametrize(
    ("config", "wanted"),
    [
        ({"rope_theta": 5e5}, {"rope_type": "default", "rope_theta": 5e5}),
        ({}, {"rope_type": "default", "rope_theta": 10000.0}),
        (
            {"rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 2.0}},
            {"rope_type": "linear", "rope_theta": 5e5, "factor": 2.0},
        ),
        (
            {"rope_parameters": {"full_attention": dict(YARN), "sliding_attention": {"rope_theta": 1.0}}},
            YARN,
        ),
        (
            {"rope_parameters": {"rope_type": "default", "rope_theta": 2.0, "partial_rotary_factor": 0.5}},
            {"rope_type": "default", "rope_theta": 2.0},
        ),
    ],
)
def test_rope_is_read_from_old_and_new_configs(config, wanted):
    assert rope_of(config) == wanted


@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        ("eagle3", {"draft_vocab_size": 40, "fc_norm": True, "norm_output": True, "target": "org/model"}),
        ("eagle3", {"feature_layers": (0, 8), "num_hidden_layers": 3, "fc_bias": True}),
        ("eagle3", {"target_hidden_size": 48}),
        ("eagle3", {"norm_before_fc": True, "norm_before_residual": True, "qk_norm": True}),
        ("eagle3", {"sliding_window": 7, "rms_norm_eps": 3e-5, "dtype": "bfloat16", "rope_parameters": YARN}),
        ("eagle1", {"fc_bias": True, "attention_bias": True}),
        ("medusa", {"medusa_heads": 3, "draft_vocab_size": 40}),
    ],
)
def test_config_survives_its_json(kind, settings):
    config = HeadConfig.for_target(TARGET, kind, **settings)
    assert HeadConfig.from_json(json.loads(json.dumps(config.to_json()))) == config


def test_something_else_is_not_taken_for_a_head():
    with pytest.raises(UserError, match=r"x/config\.json: lacks kind, hidden_size, intermediate_size"):
        HeadConfig.from_json({"vocab_size": 3, "num_attention_heads": 2}, "x/config.json")


@pytest.mark.parametrize("name", ["num_key_value_heads", "head_dim", "max_position_embeddings"])
def test_nothing_is_guessed_of_a_head_of_ours(name):
    value = HeadConfig.for_target(TARGET, "eagle3").to_json()
    with pytest.raises(UserError, match=f"lacks {name}; is this"):
        HeadConfig.from_json({**value, name: None})
    assert value["eagle_train"].pop("kind") == "eagle3"
    with pytest.raises(UserError, match="lacks kind; is this"):
        HeadConfig.from_json(value)
