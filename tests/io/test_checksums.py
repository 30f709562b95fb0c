"""Equal content has an equal sum."""

from eagle_train.io.checksums import sha256_json


def test_sha256_json_ignores_key_order():
    assert sha256_json({"a": 1, "b": 2}) == sha256_json({"b": 2, "a": 1}) != sha256_json({"a": 2, "b": 1})
