"""Autocast of CUDA. Torch's own kernels cast what C++ knows to be on a GPU, which pretend tensors are not.

So each is replaced by one that does the same for pretend tensors; which operation goes by which rule is read
from the lists in torch's own header.
"""

from __future__ import annotations

import functools
import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

from .tensor import Pretend

_KEY = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCUDA)
_HEADER = Path(torch.__file__).parent / "include/ATen/autocast_mode.h"


@functools.cache
def operations() -> list[tuple[str, str, str]]:
    """Return (rule, operation, overload) as torch's header lists them, `norm` left out."""
    blocks = re.findall(r"#define AT_FORALL_(\w+)\(_\)((?:.*\\\n)*.*\n)", _HEADER.read_text())
    return [
        (rule, name, overload or "default")
        for rule, block in blocks
        if rule in _RULES
        for name, overload in re.findall(r"_\((\w+)(?:, (\w+))?\)", block)
    ]


def _cast(values: Any, dtype: torch.dtype) -> Any:
    def one(x: Pretend) -> Tensor:
        return x.to(dtype) if x.is_floating_point() and x.dtype != torch.float64 else x

    return tree_map_only(Pretend, one, values)


def _lower(op: Any, args: Any, kwargs: Any) -> Any:
    return op(
        *_cast(args, torch.get_autocast_dtype("cuda")), **_cast(kwargs, torch.get_autocast_dtype("cuda"))
    )


def _wider(op: Any, args: Any, kwargs: Any) -> Any:
    return op(*_cast(args, torch.float32), **_cast(kwargs, torch.float32))


def _sums(op: Any, args: Any, kwargs: Any) -> Any:
    first = args[0]
    if isinstance(first, Pretend) and first.dtype in (torch.float16, torch.bfloat16):
        takes = any(argument.name == "dtype" for argument in op._schema.arguments)
        if takes and kwargs.get("dtype") is None and not any(isinstance(x, torch.dtype) for x in args):
            kwargs = {**kwargs, "dtype": torch.float32}
    return op(*args, **kwargs)


def _widest(op: Any, args: Any, kwargs: Any) -> Any:
    dtypes = {
        x.dtype for x in tree_leaves((args, kwargs)) if isinstance(x, Pretend) and x.is_floating_point()
    }
    to = torch.float32 if torch.float32 in dtypes else torch.get_autocast_dtype("cuda")
    return op(*_cast(args, to), **_cast(kwargs, to))


_RULES = {"LOWER_PRECISION_FP": _lower, "FP32": _wider, "FP32_SET_OPT_DTYPE": _sums, "PROMOTE": _widest}


def _kernel(op: Any, rule: Any) -> Any:
    def run(*args: Any, **kwargs: Any) -> Any:
        with torch._C._ExcludeDispatchKeyGuard(_KEY):
            return rule(op, args, kwargs)

    return run


@contextmanager
def replaced() -> Iterator[None]:
    """Let autocast of device_type="cuda" work on pretend tensors meanwhile."""
    with torch.library._scoped_library("aten", "IMPL") as library:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that kernels are replaced
            for rule, name, overload in operations():
                op = getattr(getattr(torch.ops.aten, name), overload)
                suffix = "" if overload == "default" else f".{overload}"
                library.impl(name + suffix, _kernel(op, _RULES[rule]), "AutocastCUDA")
        yield
