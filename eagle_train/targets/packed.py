"""Packed weights: by which method, whether the config says so, and what they stand for."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from eagle_train.errors import UserError

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

    from eagle_train.targets.headers import Stored

NUMBERS = ("F16", "BF16", "F32", "F64")  # safetensors' names of what loading casts to the dtype asked for
# last parts of the names by which quantisers store scales and packed weights; a logit_scale is none
_OF_PACKED = re.compile(
    r"[._]((weight|input|proj)_scales?(_inv|_2)?|scale_(weight|input)|scales|qweight|qzeros|weight_packed)$"
)


def quantisation(config: PretrainedConfig) -> str | None:
    """Return the method by which a config says that its weights are quantised, None where it does not."""
    found: Any = getattr(config, "quantization_config", None)
    if found is None:
        return None
    method = found.get("quant_method") if isinstance(found, dict) else found.quant_method
    return str(getattr(method, "value", method))


def refuse_packed(
    target: str, config: PretrainedConfig, model: PreTrainedModel, stored: Iterable[Stored]
) -> None:
    """Raise UserError where weights are packed though `config` says of no quantisation.

    Loading takes packed weights for plain ones, and leaves their scales out. `stored` are the checkpoint's
    tensors; of `model` only names are read, so it may be without weights.
    """
    if quantisation(config) is not None:
        return
    floating = {name: p.is_floating_point() for name, p in model.named_parameters(remove_duplicate=False)}
    known = {*floating, *(name for name, _ in model.named_buffers())}
    for tensor in stored:
        of_body = f"{model.base_model_prefix}.{tensor.name}"  # files of a body alone leave its name out
        is_weight = floating.get(tensor.name, floating.get(of_body, tensor.name.endswith(".weight")))
        if is_weight and tensor.dtype.startswith("F8") and not _is_plain_fp8(config):
            raise UserError(
                f"{target}: {tensor.name} holds {tensor.dtype}, but config.json has neither a "
                "quantization_config that says how it is scaled nor a float8 dtype; put back the one that it "
                'was quantised with, or, where its numbers are the weights, "dtype": "float8_e4m3fn"'
            )
        if is_weight and not tensor.dtype.startswith(("F8", *NUMBERS)):
            raise _packed(target, f"{tensor.name} holds {tensor.dtype}")
        if _OF_PACKED.search(tensor.name) and known.isdisjoint((tensor.name, of_body)):
            raise _packed(target, f"{tensor.name} belongs to a packed weight")


def _is_plain_fp8(config: PretrainedConfig) -> bool:
    """True where fp8 numbers are the weights themselves: transformers saves a model cast to fp8 so.

    It writes no scales then, names the dtype, and reads the file back by a plain cast.
    """
    dtypes = (getattr(part, "dtype", None) for part in (config, config.get_text_config()))
    return any("float8" in str(dtype) for dtype in dtypes)


def _packed(target: str, what: str) -> UserError:
    return UserError(
        f"{target}: {what}, but config.json has no quantization_config; put back the one that it was "
        "quantised with, or use the checkpoint that is not quantised"
    )


def dense(weight: Tensor) -> Tensor:
    """Return a weight as an ordinary tensor, dequantised where its kind says how, else as it is packed."""
    kind, weight = type(weight), weight.detach()
    if kind.dequantize is not Tensor.dequantize:
        return weight.dequantize()
    return weight if kind in (Tensor, torch.nn.Parameter) else weight.as_subclass(Tensor)


def dense_output(weight: Tensor, name: str, what: str) -> Tensor:
    """Return an embedding or lm_head [V, H] in numbers; UserError where it is packed otherwise."""
    found = dense(weight)
    if not found.is_floating_point():
        raise UserError(
            f"{name}: its {what} is packed as {str(found.dtype).removeprefix('torch.')}, wanted numbers; use "
            f"a checkpoint whose {what} is left as it is, as quantisers do unless told otherwise"
        )
    return found
