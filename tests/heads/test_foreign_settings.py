"""Layer ids, rotation and windows of a foreign head are taken from wherever they stand."""

from __future__ import annotations

import pytest

from eagle_train.heads.foreign import read_any, read_foreign
from eagle_train.heads.foreign_config import Told

from .foreign_heads import EAGLE3, USUAL, Forward, N, assert_same, eagle3_config, eagle3_tensors, write


@pytest.mark.parametrize(
    ("top", "nested", "depth", "layers"),
    [
        ([2, 6, 9], [1, 5, 8], None, (2, 6, 9)),  # both, one apart: what our own exports hold
        ([3, 7, 10], None, N, (3, 7, 10)),  # top level alone: inputs of layers
        (None, [1, 5, 8], N, USUAL),  # the usual three as outputs
        (None, [2, 6, 9], N, USUAL),  # the usual three as inputs
        (None, [8, 1, 5], N, USUAL),  # in any order: states are captured low to high
        (None, None, N, ()),
    ],
)
def test_layer_ids_are_resolved_where_only_one_reading_fits(top, nested, depth, layers, tmp_path):
    folder = write(tmp_path / "head", eagle3_config(top, nested), eagle3_tensors("midlayer"))
    assert read_foreign(folder, num_target_layers=depth).head.config.feature_layers == layers


@pytest.mark.parametrize(
    ("changes", "told", "base"),
    [
        ({}, Told(), 25000.0),
        ({"rope_theta": None, "rope_parameters": {"rope_type": "default", "rope_theta": 9e5}}, Told(), 9e5),
        ({"rope_theta": None}, Told(), 10000.0),
        ({}, Told(rope_theta=5e5), 5e5),
        ({"rope_scaling": {"type": "llama3", "factor": 8.0}}, Told(rope_theta=10000.0), 10000.0),
    ],
)
def test_rope_is_taken_from_wherever_it_stands(changes, told, base, tmp_path):
    tensors = eagle3_tensors("midlayer")
    read = read_foreign(write(tmp_path / "head", {**EAGLE3, **changes}, tensors), told)
    assert_same(read.head, Forward(tensors, "midlayer", base, eagle3=True))
    assert any("rope_theta is absent" in note for note in read.notes) == (
        base == 10000.0 and not told.rope_theta
    )


def test_scaled_rope_is_read_and_its_trap_named(tmp_path):
    scaling = {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 128,
    }
    folder = write(tmp_path / "head", {**EAGLE3, "rope_scaling": scaling}, eagle3_tensors("midlayer"))
    read = read_foreign(folder)
    assert read.head.config.rope_parameters == {**scaling, "rope_theta": 25000.0}
    assert any("try --rope-theta 10000" in note for note in read.notes)
    with pytest.warns(UserWarning, match=r"try --rope-theta 10000 \(an option of eagle import\)"):
        read_any(folder)  # as commands do that have no such option


@pytest.mark.parametrize(
    ("changes", "told", "window"),
    [
        ({"sliding_window": 9, "layer_types": ["sliding_attention"]}, Told(), 9),
        ({"sliding_window": 9, "layer_types": ["full_attention"]}, Told(), None),
        ({"sliding_window": 9, "use_sliding_window": False}, Told(), None),
        ({"sliding_window": None, "use_sliding_window": True}, Told(), None),
        ({"sliding_window": 9}, Told(sliding_window=9), 9),
        ({"sliding_window": 9}, Told(sliding_window=0), None),
    ],
)
def test_a_sliding_window_is_honoured_where_it_is_said(changes, told, window, tmp_path):
    folder = write(tmp_path / "head", {**EAGLE3, **changes}, eagle3_tensors("midlayer"))
    assert read_foreign(folder, told).head.config.sliding_window == window
