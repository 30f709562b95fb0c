"""What a plan cuts must add up: a layer put together from its parts gives what the parts give together.

The check at the start compares the cut model with itself; a plan that leaves a sum out, or deals heads out
wrongly, would pass it.
"""

from __future__ import annotations

from copy import deepcopy
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from eagle_train.errors import UserError
from eagle_train.targets.load import Target

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_TOKENS = 8
_OFF = 0.05  # of what a layer adds to the stream; a sum left out is off by about half of it
_UNITS = 4  # roundings of the stream itself, which may be far larger than what a layer adds


def check_cut(target: Target, skeleton: PreTrainedModel) -> None:
    """Raise UserError where a layer of the cut `target` differs from the same layer put together.

    The first layer, the middle and the last one are run whole, one at a time, on what their cut twins read.
    `skeleton` is the same model without weights.
    """
    whole_layers = Target(target.name, target.revision, skeleton).layers
    names = {id(module): name for name, module in target.model.named_modules()}
    ids = torch.arange(1, _TOKENS + 1, device=target.device)[None] % target.vocab_size
    for k in sorted({0, target.num_layers // 2, target.num_layers - 1}):
        cut, seen = target.layers[k], list[Any]()
        handle = cut.register_forward_hook(lambda *call, seen=seen: seen.append(call), with_kwargs=True)
        try:
            target.run_body(ids)
        finally:
            handle.remove()
        ((_, given, named, made),) = seen
        layer = _put_together(target, deepcopy(whole_layers[k]), cut, names[id(cut)])
        with torch.no_grad():
            wanted = _stream(layer(*given, **named)).float()
        got, read = _stream(made).float(), (given[0] if given else named["hidden_states"]).float()
        eps = torch.finfo(target.dtype).eps
        bound = _OFF * (wanted - read).norm() + _UNITS * eps * wanted.norm()
        if not bool((got - wanted).norm() <= bound) and bool(wanted.isfinite().all()):
            raise UserError(
                f"{target.name}: layer {k}, cut by transformers' plan, gives other states than as a whole "
                f"(off by {float((got - wanted).norm() / (wanted - read).norm()):.0%} of what it adds); "
                "use --device-map auto"
            )


def _put_together(target: Target, layer: nn.Module, cut: nn.Module, name: str) -> nn.Module:
    """Give `layer`, which has no weights, those of its twin `cut`, the model's module `name`, in full."""
    for module_name, module in layer.named_modules():
        twin = cut.get_submodule(module_name)
        for kind in ("_parameters", "_buffers"):
            for leaf, part in getattr(twin, kind).items():
                if part is not None:
                    path = ".".join(filter(None, (name, module_name, leaf)))
                    value = target.whole(path, part) if kind == "_parameters" else part
                    getattr(module, kind)[leaf] = _frozen(value) if kind == "_parameters" else value
    return layer.eval()


def _frozen(weight: Tensor) -> nn.Parameter:
    return nn.Parameter(weight, requires_grad=False)


def _stream(made: Any) -> Tensor:
    return made[0] if isinstance(made, tuple) else made
