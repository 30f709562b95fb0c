"""Every operation on pretend tensors, and every tensor that is made on a pretend device."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map_only, tree_unflatten

from . import kernels
from .copies import COPIES
from .placement import check, check_generator, place_of
from .tensor import Pretend, wrap

_aten = torch.ops.aten
_CPU = torch.device("cpu")
_COMPOSITE = torch._C.DispatchKey.CompositeImplicitAutograd
_WAITS = {_aten._local_scalar_dense.default, _aten.equal.default, _aten.nonzero.default}
GENERATORS: dict[int, Any] = {}  # those of pretend devices, by the address that C++ knows them by
_inside = threading.local()  # .places: devices of the torch calls that this thread is in


class Operations(TorchDispatchMode):
    """Sees what no pretend tensor is part of: tensors that are made on the device."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # nothing is compiled: the seconds that loading the compiler takes are saved

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return operate(func, args, kwargs or {})


@contextmanager
def within(place: torch.device | None) -> Iterator[None]:
    """While torch works for tensors on `place`, what C++ makes on their device, meta to it, is there."""
    places = _inside.__dict__.setdefault("places", [])
    places.append(place)
    try:
        yield
    finally:
        places.pop()


def operate(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Run `func` on real values; what comes out is where CUDA would have it, or the error is CUDA's."""
    with torch._C.DisableTorchFunction():
        leaves, spec = tree_flatten((args, kwargs))
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        place = place_of(tensors)
        if func in _SPECIAL:
            return _SPECIAL[func](func, *args, **kwargs)
        moved = any(isinstance(leaf, torch.device) and leaf.type == "cuda" for leaf in leaves)
        if (moved or place.type == "cuda") and func.has_kernel_for_dispatch_key(_COMPOSITE):
            with Operations(), within(place):  # composite ones come here where nothing is differentiated
                return func.decompose(*args, **kwargs)
        check(func, args, kwargs, tensors)
        asked = kwargs.get("device")
        if asked is not None:
            place = _asked(asked)
        generator = kwargs.get("generator")
        check_generator(generator and GENERATORS.get(generator._cdata, generator), place)
        if func in _WAITS:
            COPIES.wait(place)
        pretend = {id(t.held): t for t in tensors if isinstance(t, Pretend)}
        real = [leaf.held if isinstance(leaf, Pretend) else leaf for leaf in leaves]
        args, kwargs = tree_unflatten(real, spec)
        if asked is not None and place.type == "cuda":
            kwargs["device"] = _CPU
        pinned = bool(kwargs.pop("pin_memory", False))
        made = kernels.KERNELS.get(func, func)(*args, **kwargs)
        if place.type == "cuda":
            ordinary = func.is_view and not tensors[0].is_inference()  # as a view is of what it is a view of
            with torch.inference_mode(False) if ordinary else nullcontext():
                return tree_map_only(Tensor, lambda t: _outside(t, pretend, place), made)
        return COPIES.pin(made) if pinned else made


def _outside(real: Tensor, known: dict[int, Pretend], place: torch.device) -> Tensor:
    """Return the pretend tensor of `real`: the given one where an operation returns what it was given."""
    own = known.get(id(real))
    if own is None:
        return wrap(real, place)
    if own.shape != real.shape or own.stride() != real.stride():
        raise RuntimeError("pretend tensors keep their shape: an operation changes one in place")
    return own


def _asked(device: torch.device) -> torch.device:
    """Return the device asked for; C++ that asks for that of its own pretend tensors names meta."""
    places = _inside.__dict__.get("places", [])
    return places[-1] if device.type == "meta" and places and places[-1] is not None else device


def _to_copy(func: Any, source: Tensor, **kwargs: Any) -> Tensor:
    place = _asked(kwargs.pop("device", None) or source.device)
    if place.type == "meta":
        return func(source, device=place, **kwargs)
    waits = not kwargs.pop("non_blocking", False)
    kwargs.pop("pin_memory", None)
    real = func(getattr(source, "held", source), **kwargs)
    _cross(real, place, source, waits)
    return wrap(real, place) if place.type == "cuda" else real


def _copy_(func: Any, self: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
    real = getattr(self, "held", self)
    func(real, getattr(source, "held", source))
    _cross(real, self.device, source, not non_blocking, fresh=False)
    return self


def _cross(real: Tensor, place: torch.device, source: Tensor, waits: bool, fresh: bool = True) -> None:
    """Note that values went from `source` to `real` on `place`; torch's fresh CPU memory is page-locked."""
    if source.device.type == "cuda" and place == _CPU:
        if waits:
            COPIES.wait(source.device)
        elif fresh or COPIES.is_pinned(real):
            COPIES.arrive(COPIES.pin(real) if fresh else real, source.device)
    elif source.device == _CPU and place.type == "cuda" and not waits and COPIES.is_pinned(source):
        COPIES.leave(source, place)


def _pin_memory(func: Any, self: Tensor, device: Any = None) -> Tensor:
    if self.device != _CPU:
        raise RuntimeError(f"cannot pin a tensor on {self.device}: only dense CPU tensors can be pinned")
    return COPIES.pin(self.clone())


def _is_pinned(func: Any, self: Tensor, device: Any = None) -> bool:
    return self.device == _CPU and COPIES.is_pinned(self)


_SPECIAL = {
    _aten._to_copy.default: _to_copy,
    _aten.copy_.default: _copy_,
    _aten._pin_memory.default: _pin_memory,
    _aten.is_pinned.default: _is_pinned,
}
