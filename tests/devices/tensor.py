"""A tensor that says it lives on a GPU and holds its values on the CPU.

To C++ it is a meta tensor, as autograd needs a device that this build of torch knows; to Python and to every
operation that reaches `operate` it is on `place`. The autocast key is CUDA's own.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor

_AUTOCAST = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCUDA)


class Pretend(Tensor):
    """Values `held` (a CPU tensor, of the same layout) that pretend to be on `place`, such as cuda:0."""

    held: Tensor
    place: torch.device
    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        from .dispatch import operate

        return operate(func, args, kwargs or {})

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return self.place

    @property
    def is_cuda(self) -> bool:  # type: ignore[override]
        return True

    @property
    def is_meta(self) -> bool:  # type: ignore[override]
        return False

    def get_device(self) -> int:
        return self.place.index

    def numpy(self, *, force: bool = False) -> Any:
        if force:
            return self.detach().cpu().numpy()
        raise TypeError(
            f"can't convert {self.place} device type tensor to numpy. Use Tensor.cpu() to copy the tensor to "
            "host memory first."
        )

    def __array__(self, *_: Any, **__: Any) -> Any:
        return self.numpy()

    def tolist(self) -> Any:
        return self.detach().cpu().tolist()

    def data_ptr(self) -> int:
        return self.held.data_ptr()

    def untyped_storage(self) -> torch.UntypedStorage:
        return self.held.untyped_storage()

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"pretend({self.held}, device='{self.place}')"

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        if id(self) not in memo:
            made = wrap(self.held.clone(), self.place).requires_grad_(self.requires_grad)
            if isinstance(self, torch.nn.Parameter):
                made._is_param = True
            made.grad = copy.deepcopy(self.grad, memo)
            memo[id(self)] = made
        return memo[id(self)]

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError("cannot pickle a pretend tensor: move it to the CPU")  # as Python says of others


def wrap(real: Tensor, place: torch.device) -> Pretend:
    """Return `real`, sharing memory, as a tensor on `place`."""
    with torch._C.DisableTorchFunction():
        made = Tensor._make_wrapper_subclass(
            Pretend,
            real.size(),
            strides=real.stride(),
            storage_offset=real.storage_offset(),
            dtype=real.dtype,
            device=torch.device("meta"),
            _extra_dispatch_keys=_AUTOCAST,
        )
    made.held, made.place = real, place
    return made
