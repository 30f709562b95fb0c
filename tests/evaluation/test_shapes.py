"""Drafts' shapes on disk, as eagle tune writes them and ``--draft`` reads them."""

from __future__ import annotations

import re

import pytest

from eagle_train.decoding.shapes import Chain, Dynamic, Sampled, Static, read_shape, write_shape
from eagle_train.errors import UserError


@pytest.mark.parametrize(
    "shape", [Chain(4, 0.25), Static(((0,), (1,), (0, 2))), Dynamic(12, 3, 4), Sampled((3, 1))]
)
def test_a_shape_survives_the_disk(tmp_path, shape):
    write_shape(tmp_path / "shape.json", shape)
    assert read_shape(tmp_path / "shape.json") == shape


def test_a_shape_that_cannot_be_is_refused(tmp_path):
    for text, words in (
        ('{"draft": "chian", "gamma": 3}', "no draft of a known kind"),
        ('{"draft": "chain", "gama": 3}', "not a shape of eagle tune"),
        ('{"draft": "static", "paths": [[0, 1]]}', "has no parent"),
        ('{"draft": "static"}', "not a shape of eagle tune"),
        ('{"draft": "chain", "gamma": 0}', "chain: got 0 guesses"),
        ('{"draft": "chain", "stop": 1.5}', "chain: got stop 1.5"),
        ('{"draft": "chain", "stop": "half"}', "not a shape of eagle tune"),
        ('{"draft": "chain", "gamma": 2.5}', "got 2.5 guesses, wanted a whole number"),
        ('{"draft": "chain", "gamma": true}', "got True guesses, wanted a whole number"),
        ('{"draft": "chain", "gamma": 257}', "got 257 guesses, wanted at most 256"),
        ('{"draft": "dynamic", "top_k": null}', "got top_k None, wanted a whole number"),
        ('{"draft": "dynamic", "top_k": 1024, "depth": 256}', "times depth 262144, wanted at most 2048"),
        ('{"draft": "dynamic", "total_tokens": 4096}', "got total_tokens 4096, wanted at most 1024"),
        ('{"draft": "sampled", "widths": [1000000, 1000]}', "a width of 1000000, wanted at most 1024"),
        ('{"draft": "sampled", "widths": [1000, 1000]}', "got 1001001 nodes with its root, wanted at"),
        ('{"draft": "sampled", "widths": "42"}', "a width of '4', wanted a whole number"),
        ('{"draft": "sampled", "widths": 7}', "not a shape of eagle tune"),
        ('{"draft": "static", "paths": [[0.5]]}', "a rank of 0.5, wanted a whole number"),
        ('{"draft": "static", "paths": {"a": 1}}', "a rank of 'a', wanted a whole number"),
        ('{"draft": "static", "paths": []}', "got 1 nodes with its root, wanted at least 2"),
        ('{"draft": ["chain"]}', "no draft of a known kind"),
    ):
        (tmp_path / "shape.json").write_text(text)
        with pytest.raises(UserError, match=re.escape(words)) as caught:
            read_shape(tmp_path / "shape.json")
        assert str(caught.value).startswith(str(tmp_path / "shape.json"))
