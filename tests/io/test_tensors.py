"""Tensor files: equal bytes, readable by others, a full disk as a sentence."""

import os

import pytest
import torch

from eagle_train.errors import UserError
from eagle_train.io.tensors import load_tensors, save_tensors
from eagle_train.io.text import write_json


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
def test_safetensors_on_a_full_disk_is_the_same_sentence(tmp_path, monkeypatch):
    import safetensors.torch

    def full(*args, **kwargs):
        raise safetensors.SafetensorError(
            "Error while serializing: I/O error: No space left on device (os error 28)"
        )

    monkeypatch.setattr(safetensors.torch, "save_file", full)
    with pytest.raises(UserError, match="the disk is full"):
        save_tensors(tmp_path / "a.safetensors", {"x": torch.zeros(2)})
    assert os.listdir(tmp_path) == []


def test_tensors_return_by_value_and_bytes_depend_on_content_only(tmp_path):
    tensors = {"b": torch.arange(6).view(2, 3).t(), "a": torch.randn(3).bfloat16()}
    save_tensors(tmp_path / "1", tensors, {"header": "{}"})
    save_tensors(tmp_path / "2", dict(reversed(tensors.items())), {"header": "{}"})
    read, metadata = load_tensors(tmp_path / "1")
    assert metadata == {"header": "{}"}
    assert all(torch.equal(read[name], tensors[name]) for name in tensors)
    assert (tmp_path / "1").read_bytes() == (tmp_path / "2").read_bytes()


def test_tensor_files_are_as_readable_as_any_new_file(tmp_path):
    save_tensors(tmp_path / "a.safetensors", {"x": torch.zeros(2)})
    write_json(tmp_path / "b.json", {})
    modes = {(tmp_path / name).stat().st_mode & 0o777 for name in ("a.safetensors", "b.json")}
    assert len(modes) == 1
