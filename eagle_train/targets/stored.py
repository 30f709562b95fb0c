"""How many bytes a target's weights will take in memory, quantised or not, before any is loaded."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from eagle_train.targets.checkpoint import ODD, explained, quiet
from eagle_train.targets.headers import stored_tensors
from eagle_train.targets.packed import NUMBERS, quantisation

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel


def weights_bytes(
    target: str, config: PretrainedConfig, skeleton: PreTrainedModel, dtype: torch.dtype
) -> int:
    """Return the bytes of the target's weights once they are loaded in `dtype`.

    `skeleton` is the model that `config` describes, without weights. Of a quantised checkpoint its tensors
    count in `dtype` too, and what the files hold in other forms (packed weights, scales) as it is stored.
    Weights that would be quantised only while they are loaded, or whose files have no headers to read, count
    as if they were not quantised.
    """
    whole = sum(parameter.numel() for parameter in skeleton.parameters()) * dtype.itemsize
    if quantisation(config) is None or target.endswith(".gguf") or _unpacked(config):
        return whole
    plain = dict(skeleton.named_parameters(remove_duplicate=False))
    counted: set[int] = set()  # tied tensors may be stored twice
    total = 0
    with explained(target):
        stored = list(stored_tensors(target, config))
    for tensor in stored:
        parameter = plain.get(tensor.name)
        if parameter is None or tensor.dtype not in NUMBERS or tensor.shape != tuple(parameter.shape):
            total += tensor.size
        elif id(parameter) not in counted:
            counted.add(id(parameter))
            total += parameter.numel() * dtype.itemsize
    return total or whole


def _unpacked(config: PretrainedConfig) -> bool:
    """True where loading unpacks a checkpoint, as it does with fp8 where no GPU computes in it."""
    from transformers.quantizers import AutoHfQuantizer

    try:
        with quiet():
            quantiser = AutoHfQuantizer.from_config(config.quantization_config, pre_quantized=True)
            quantiser.validate_environment(device_map=None)
    except ODD:
        return False  # loading says what is wrong; elsewhere it may be right
    return bool(getattr(quantiser.quantization_config, "dequantize", False))
