"""A pretend CUDA device for machines without one: what it computes is the CPU's, what it refuses is CUDA's.

    with pretend_cuda():
        train(shards, recipe, out)  # finds torch.cuda.is_available(), and trains on cuda:0

Faults of placement raise as on a GPU: operations that mix devices, `.numpy()` of a GPU's tensor, a generator
of the CPU for a GPU's random numbers, memory read before a copy that does not wait is there. Attention by
CUDA's kernels and autocast of CUDA are plain arithmetic with their signatures and rules. Random numbers come
from the CPU's generators. There is one stream, and no kernel: true rounding, speed, memory, races between
streams and NCCL are beyond it.
"""

from __future__ import annotations

import contextlib
import importlib
import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map_only

from . import autocast
from .copies import COPIES
from .dispatch import GENERATORS, Operations, within
from .tensor import Pretend

_GIB = 1 << 30
_PICKS = {torch.Tensor.__getitem__, torch.Tensor.__setitem__}
_MAKERS = {torch.tensor, torch.as_tensor, torch.asarray, torch.scalar_tensor}


class _Calls(TorchFunctionMode):
    """Sees torch's functions as Python calls them: a plain "cuda" gets its number, which C++ cannot find."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.device:
            return func("cuda", *args) if args and type(args[0]) is int else func(*args, **kwargs)
        args, kwargs = [_numbered(x) for x in args], {k: _numbered(v) for k, v in kwargs.items()}
        if isinstance(kwargs.get("device"), str | int):
            kwargs["device"] = _numbered_place(kwargs["device"])
        if func is torch.Tensor.cuda:
            func, args = torch.Tensor.to, [args[0], _numbered(torch.device("cuda", *args[1:]))]
        if func is torch.Tensor.to and type(args[-1]) is int:
            args[-1] = _numbered_place(args[-1])
        if func is torch.Tensor.to and isinstance(args[0], Pretend) and _is_as_wanted(*args, **kwargs):
            return args[0]
        if func in _PICKS and isinstance(args[0], Pretend):
            args[1] = tree_map_only(list, _positions, args[1], is_leaf=lambda x: isinstance(x, list))
        if func in _MAKERS or func is torch.Tensor.new_tensor:
            return _made(func, *args, **kwargs)
        asked = kwargs.get("device")
        meta = asked is not None and asked.type == "meta"
        with within(None if meta else next((x.place for x in _tensors(args)), None)):
            if func is torch.Tensor.backward:
                with self:  # functions in Python run below it, which make tensors, too
                    return _backward(*args, **kwargs)
            return func(*args, **kwargs)


def _is_as_wanted(self: Pretend, *args: Any, **kwargs: Any) -> bool:
    """True where `self.to(...)` is `self`, which C++ cannot see."""
    wanted = [*args, kwargs.get("device"), kwargs.get("dtype")]
    others = [x for x in args if isinstance(x, torch.Tensor)]
    wanted += [x.device for x in others] + [x.dtype for x in others]
    same = all(
        x == (self.device if isinstance(x, torch.device) else self.dtype)
        for x in (torch.device(x) if isinstance(x, str) else x for x in wanted)
        if isinstance(x, (torch.device, torch.dtype))
    )
    return same and not kwargs.get("copy") and True not in args[2:]


def _made(func: Any, *args: Any, device: Any = None, **kwargs: Any) -> Any:
    """Tensors from Python's values: made on the CPU and moved, as torch does."""
    if func is torch.Tensor.new_tensor:
        device = args[0].device if device is None else device
        func, args = torch.tensor, args[1:]
    if isinstance(args[0], Pretend):
        return func(*args, **kwargs) if device is None else func(*args, **kwargs).to(device)
    found = func(*tree_map_only(Pretend, lambda x: x.item(), args), **kwargs)
    return found if device is None else found.to(device)


def _backward(
    loss: Any, gradient: Any = None, retain_graph: Any = None, create_graph: bool = False, inputs: Any = None
) -> None:
    torch.autograd.backward(loss, gradient, retain_graph, create_graph, inputs=inputs)


def _numbered_place(place: str | int) -> torch.device:
    return torch.device("cuda", place) if isinstance(place, int) else _numbered(torch.device(place))


def _positions(listed: list[Any]) -> torch.Tensor:
    return torch.tensor(listed) if listed else torch.zeros(0, dtype=torch.long)


def _tensors(args: Any) -> Iterator[Pretend]:
    for x in args:
        if isinstance(x, Pretend):
            yield x
        elif isinstance(x, (list, tuple)):
            yield from _tensors(x)


_current = threading.local()


def _index() -> int:
    return getattr(_current, "index", 0)


def _numbered(x: Any) -> Any:
    if isinstance(x, str) and x.startswith("cuda"):
        x = torch.device(x)
    if isinstance(x, torch.device) and x.type == "cuda" and x.index is None:
        return torch.device("cuda", _index())
    return x


class _Generator(torch.Generator):
    """A generator of the device: the CPU's, under another name."""

    def __new__(cls, device: Any = "cpu") -> Any:
        place = _numbered(torch.device(device))
        if place.type == "cpu":
            return _generator()
        made = super().__new__(cls)
        made.place = place
        GENERATORS[made._cdata] = made
        return made

    @property
    def device(self) -> torch.device:
        return self.place


_generator = torch.Generator


@contextlib.contextmanager
def _device(place: Any) -> Iterator[None]:
    before = _index()
    _set_device(place)
    try:
        yield
    finally:
        _current.index = before


def _set_device(place: Any) -> None:
    index = place if isinstance(place, int) else torch.device(place).index
    _current.index = _index() if index is None else index


def _synchronize(place: Any = None) -> None:
    """Wait for `place`: the current device where it is not named, and that alone."""
    index = place if isinstance(place, int) or place is None else torch.device(place).index
    COPIES.wait(torch.device("cuda", _index() if index is None else index))


def _as_thread(run: Any) -> Any:
    """Threads, too, work with the device."""

    def wrapped(self: threading.Thread) -> None:
        with Operations(), _Calls():
            run(self)

    return wrapped


def _swapping(apply: Any) -> Any:
    """Parameters stay the same objects when their module moves, as on a GPU; shared ones stay shared."""

    def wrapped(self: torch.nn.Module, fn: Any, recurse: bool = True) -> Any:
        before = torch.__future__.get_swap_module_params_on_conversion()
        torch.__future__.set_swap_module_params_on_conversion(True)
        try:
            return apply(self, fn, recurse)
        finally:
            torch.__future__.set_swap_module_params_on_conversion(before)

    return wrapped


def _cuda(count: int) -> dict[str, Any]:
    """torch.cuda as it is with `count` GPUs of compute capability 9.0."""
    properties = SimpleNamespace(
        name="Pretend", major=9, minor=0, total_memory=80 * _GIB, multi_processor_count=132
    )
    return {
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "init": lambda: None,
        "_lazy_init": lambda: None,
        "device_count": lambda: count,
        "current_device": _index,
        "set_device": _set_device,
        "device": _device,
        "synchronize": _synchronize,
        "get_device_name": lambda device=None: properties.name,
        "get_device_capability": lambda device=None: (9, 0),
        "get_device_properties": lambda device=None: properties,
        "is_bf16_supported": lambda including_emulation=True: True,
        "mem_get_info": lambda device=None: (60 * _GIB, 80 * _GIB),
        "memory_allocated": lambda device=None: _GIB,
        "memory_reserved": lambda device=None: _GIB,
        "max_memory_allocated": lambda device=None: _GIB,
        "reset_peak_memory_stats": lambda device=None: None,
        "empty_cache": lambda: None,
        "manual_seed": lambda seed: None,  # torch.manual_seed does, as random numbers are the CPU's
        "manual_seed_all": lambda seed: None,
    }


@contextlib.contextmanager
def pretend_cuda(count: int = 1) -> Iterator[None]:
    """Let this process have `count` GPUs, cuda:0 and on, within the block."""
    accelerator = {
        "is_available": lambda: True,
        "current_accelerator": lambda check_available=False: torch.device("cuda"),
        "device_count": lambda: count,
        "current_device_index": _index,
        "synchronize": _synchronize,
        "current_stream": lambda device=None: SimpleNamespace(is_capturing=lambda: False),
    }
    module, optimizer = torch.nn.Module, importlib.import_module("torch.optim.optimizer")
    with contextlib.ExitStack() as stack:
        for owner, names in ((torch.cuda, _cuda(count)), (torch.accelerator, accelerator)):
            for name, value in names.items():
                stack.enter_context(mock.patch.object(owner, name, value))
        stack.enter_context(mock.patch.object(torch, "Generator", _Generator))
        stack.enter_context(mock.patch.object(threading.Thread, "run", _as_thread(threading.Thread.run)))
        stack.enter_context(mock.patch.object(module, "_apply", _swapping(module._apply)))
        together = [torch.Tensor, torch.nn.Parameter, Pretend]  # what is taken by foreach on a GPU
        for owner in (optimizer, torch.utils._foreach_utils):
            stack.enter_context(mock.patch.object(owner, "_foreach_supported_types", together))
        stack.enter_context(autocast.replaced())
        stack.callback(_forget)
        _forget()
        with Operations(), _Calls():
            yield


def _forget() -> None:
    """Forget what was found out about the machine."""
    from accelerate.state import AcceleratorState, PartialState

    from eagle_train.heads import fused_cuda

    AcceleratorState._reset_state(reset_partial_state=True)
    PartialState._reset_state()
    fused_cuda.trusted.cache_clear()
    _current.index = 0
