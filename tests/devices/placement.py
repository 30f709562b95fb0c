"""Which operations may mix devices, as CUDA has it: where they may not, the error that it gives.

From torch's TensorIterator and the checks of each kernel: one CPU number (no dimension) beside tensors of a
GPU where an operation goes element by element, never the other way; positions on the CPU into a tensor of a
GPU, never the other way; copies between any two.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

_CPU = torch.device("cpu")
_COPIES = {"copy_", "copy", "_foreach_copy_", "_foreach_copy"}
_NUMBERS = {  # take their value from a number on the CPU though they aren't element by element by torch's tag
    "where", "masked_fill", "masked_fill_", "fill", "fill_", "index_fill", "index_fill_", "lerp", "lerp_",
}  # fmt: skip
_NO_NUMBERS = {"addcdiv", "addcdiv_"}
_POSITIONS = {"index", "index_put", "index_put_", "_index_put_impl_", "_unsafe_index"}
_UNUSED = {"_scaled_dot_product_efficient_attention_backward": {7, 8}}  # dropout's state, wherever it is


def place_of(tensors: Sequence[Tensor]) -> torch.device:
    """Return the device of the first tensor that is not on the CPU, else the CPU."""
    return next((t.device for t in tensors if t.device.type != "cpu"), _CPU)


def check(func: Any, args: Sequence[Any], kwargs: dict[str, Any], tensors: Sequence[Tensor]) -> None:
    """Raise RuntimeError, as CUDA does, where `func` may not have its `tensors` where they are."""
    places = {t.device for t in tensors}
    name = func.overloadpacket.__name__
    if len(places) < 2 or name in _COPIES:
        return
    common = place_of(tensors)
    others = [t for t in tensors if t.device != common]
    if name in _POSITIONS:
        _check_positions(args, common)
        return
    if name in _UNUSED:
        others = [x for i, x in enumerate(args) if i not in _UNUSED[name] and isinstance(x, Tensor)]
        others = [x for x in others if x.device != common]
    by_element = torch.Tag.pointwise in func.tags and name not in _NO_NUMBERS and name not in _NUMBERS
    takes_numbers = by_element or name in _NUMBERS or name.startswith("_foreach_")
    numbers = all(t.dim() == 0 and t.device == _CPU for t in others)
    changed = args[0] if func._schema.is_mutable and isinstance(args[0], Tensor) else None
    few = len(others) <= 1 or not by_element
    fine = takes_numbers and numbers and few and (changed is None or changed.device == common)
    if others and not fine:
        raise RuntimeError(
            "Expected all tensors to be on the same device, but found at least two devices, "
            f"{common} and {others[0].device}! (when checking arguments of {func})"
        )


def _check_positions(args: Sequence[Any], common: torch.device) -> None:
    """self[indices] and self[indices] = values."""
    own = args[0].device
    for index in args[1]:
        if index is not None and index.device not in (own, _CPU):
            raise RuntimeError(
                f"indices should be either on cpu or on the same device as the indexed tensor ({own})"
            )
    values = args[2] if len(args) > 2 and isinstance(args[2], Tensor) else None
    number = values is not None and values.dim() == 0 and values.device == _CPU
    if values is not None and values.device != own and not number:
        raise RuntimeError(f"Expected self and values on one device, got {own} and {values.device}")


def check_generator(generator: Any, place: torch.device) -> None:
    """Random numbers are drawn on a device by a generator of that kind of device."""
    if generator is not None and generator.device.type != place.type:
        raise RuntimeError(
            f"Expected a '{place.type}' device type for generator but found '{generator.device.type}'"
        )
