"""A target's config.json that describes no model is refused by its key, whatever would be loaded first."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from eagle_train.data.tokenizer import load_tokenizer
from eagle_train.errors import UserError
from eagle_train.targets.load import load_target
from eagle_train.targets.survey import survey


@pytest.fixture
def changed(tiny_target_dir: Path, tmp_path: Path) -> Callable[..., str]:
    """Return the name of a tiny target whose config.json says other things."""

    def write(**settings: Any) -> str:
        folder = tmp_path / "t"
        shutil.copytree(tiny_target_dir, folder, dirs_exist_ok=True)
        record = json.loads((tiny_target_dir / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**record, **settings}))
        return str(folder)

    return write


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("num_attention_heads", 0, "got 0, wanted a whole number from 1 to 16777216"),
        ("num_key_value_heads", 0, "got 0, wanted a whole number from 1 "),
        ("num_key_value_heads", 3, "got 3, wanted a divisor of num_attention_heads 4"),
        ("head_dim", 0, "got 0, wanted a whole number from 1 "),
        ("hidden_size", 0, "got 0, wanted a whole number from 1 "),
        ("hidden_size", 2**40, "got 1099511627776, wanted a whole number from 1 to 16777216"),
        ("num_hidden_layers", -1, "got -1, wanted a whole number from 1 to 4096"),
        ("vocab_size", 0, "got 0, wanted a whole number from 1 "),
        ("rope_theta", 0, "got 0, wanted a number above 0"),
        ("dtype", "float99", "got 'float99', wanted a dtype of torch"),
        ("quantization_config", 5, "got 5, wanted an object, or none"),
        ("hidden_act", "nope", "got 'nope', wanted a name that transformers knows"),
    ],
)
def test_a_value_of_no_model_is_named(
    changed: Callable[..., str], tiny_rows_dir: Path, key: str, value: Any, words: str
) -> None:
    name = changed(**{key: value})
    for use in (lambda: survey(tiny_rows_dir, name, None, device="cpu"), lambda: load_target(name)):
        with pytest.raises(UserError) as caught:
            use()
        assert str(caught.value).startswith(f"{name}: config.json: {key}: {words}")
        assert str(caught.value).endswith("; correct it, or fetch it again")


@pytest.mark.parametrize(
    ("rope", "words"),
    [
        ({"rope_type": "yarn"}, "factor: got None, wanted a number, which rope_type yarn needs"),
        ({"rope_theta": -1.0}, "rope_theta: got -1.0, wanted a number above 0"),
        ({"full_attention": {"rope_theta": 0}}, "full_attention.rope_theta: got 0, wanted a number above 0"),
    ],
)
def test_rope_of_no_model_is_named(changed: Callable[..., str], rope: dict[str, Any], words: str) -> None:
    name = changed(rope_parameters=rope)
    with pytest.raises(UserError) as caught:
        load_target(name)
    assert str(caught.value).startswith(f"{name}: config.json: rope_parameters.{words}")


@pytest.mark.parametrize(
    "settings", [{"num_attention_heads": 0}, {"dtype": "float99"}, {"rope_parameters": {"rope_type": "yarn"}}]
)
def test_a_tokenizer_lost_to_its_config_is_told_by_the_config(
    changed: Callable[..., str], settings: dict[str, Any]
) -> None:
    name = changed(**settings)
    (Path(name) / "tokenizer_config.json").write_text("{}")  # the config has to say which tokenizer it is
    with pytest.raises(UserError) as caught:
        load_tokenizer(name)
    assert str(caught.value).startswith(f"{name}: config.json: ")
