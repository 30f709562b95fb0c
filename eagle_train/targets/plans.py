"""transformers' tensor-parallel plans: how to ask for them, whom they suit, what they cut, and back again.

A plan says of every linear layer whether its outputs (``colwise``) or its inputs (``rowwise``) are dealt
out. Versions differ: in 5.0 ``from_pretrained`` itself takes the plan, and parts are DTensors, or plain
tensors where the plan says so; in 5.12 all are plain, and there is a function that gathers them; from 5.17 on
a `DistributedConfig` takes the plan, and parts are DTensors.
"""

from __future__ import annotations

import inspect
import re
from math import ceil, gcd, prod
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from eagle_train.errors import UserError
from eagle_train.progress import counted

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

_HEADS = ("attention", "key-value")  # of which every process holds as many
_AS_DTENSORS = {"colwise", "rowwise", "colwise_rep", "rowwise_rep"}  # in the versions that gather nothing


def arguments() -> dict[str, Any]:
    """Return what ``from_pretrained`` wants to be told to load by the model's own plan."""
    from transformers.distributed import DistributedConfig

    if "tp_plan" in inspect.signature(DistributedConfig).parameters:
        return {"distributed_config": DistributedConfig(tp_plan="auto")}
    return {"tp_plan": "auto"}


def check_plan(target: str, config: PretrainedConfig, skeleton: PreTrainedModel, size: int) -> None:
    """Raise UserError unless the target has a plan by which `size` processes can share its layers.

    `skeleton` is the model that `config` describes, without weights.
    """
    where = f"--tensor-parallel {size}: {target}"
    if target.endswith(".gguf") or getattr(config, "quantization_config", None) is not None:
        form = "a .gguf file" if target.endswith(".gguf") else "quantised"
        raise UserError(f"{where} is {form}, wanted weights that are not packed; use --device-map auto")
    plan: dict[str, str] = dict(getattr(skeleton, "_tp_plan", None) or {})
    of_layers = {name.split(".*.", 1)[1]: style for name, style in plan.items() if ".*." in name}
    if not of_layers:
        raise UserError(
            f"{where}: transformers has no tensor-parallel plan for the layers of {type(skeleton).__name__}; "
            "use --device-map auto"
        )
    if _gather() is None and (others := set(of_layers.values()) - _AS_DTENSORS):
        raise UserError(
            f"{where}: this transformers cannot put together again what its plan cuts as {min(others)}; "
            "install a newer one, or use --device-map auto"
        )
    if not any("att" in name and style.endswith("colwise") for name, style in of_layers.items()):
        return  # attention stays whole
    text = config.get_text_config()
    heads = {word: getattr(text, f"num_{word.replace('-', '_')}_heads", None) for word in _HEADS}
    counts = {word: count for word, count in heads.items() if isinstance(count, int)}
    for word, count in counts.items():
        if count % size:
            both = gcd(*counts.values())
            fitting = ", ".join(str(n) for n in range(2, both + 1) if both % n == 0)
            advice = f"wanted one of {fitting}" if fitting else "use --device-map auto"
            raise UserError(f"{where} has {counted(count, f'{word} head')}; {advice}")


def part_bytes(skeleton: PreTrainedModel, size: int, dtype: torch.dtype) -> int:
    """Return the bytes of weights in `dtype` that one of `size` processes holds, of the largest part.

    What the plan does not cut, such as norms and the biases of sums, every process holds whole. `skeleton` is
    the model without weights.
    """
    plan: dict[str, str] = dict(getattr(skeleton, "_tp_plan", None) or {})
    total = 0
    for name, weight in skeleton.named_parameters():
        rule = re.sub(r"\.\d+(?=\.|$)", ".*", name)  # of all layers
        style = plan.get(rule) or plan.get(rule.rpartition(".")[0], "")
        total += part_of(style, tuple(weight.shape), size)
    return total * dtype.itemsize


def part_of(style: str, shape: tuple[int, ...], size: int) -> int:
    """Return how many numbers of a weight of this `shape` the process with the most of them holds."""
    dims = len(shape)
    cut: int | None = None
    if style.startswith("embedding"):
        cut = 0 if style.endswith("rowwise") else 1
    elif style == "grouped_gemm":  # whole experts are dealt out
        cut = 0
    elif "colwise" in style:  # outputs, the last dimension but one, and their biases
        cut = max(dims - 2, 0)
    elif "rowwise" in style and dims > 1:
        cut = dims - 1
    return prod(ceil(n / size) if dim == cut else n for dim, n in enumerate(shape))


def whole(model: PreTrainedModel, name: str, weight: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Return the parameter `name` in its whole `shape`, of which this process holds `weight`.

    A collective: all processes of the group call it for the same parameter.
    """
    from torch.distributed.tensor import DTensor

    gather = _gather()
    if isinstance(weight, DTensor):
        weight = weight.full_tensor()
    elif tuple(weight.shape) != shape and gather is not None:
        parts = {name: weight}
        gathered = gather(parts, model.tp_plan, model._device_mesh, model._tp_size)
        weight = gathered[name].to(weight.device)
    if tuple(weight.shape) != shape:
        raise UserError(
            f"{name}: its parts make {list(weight.shape)}, wanted {list(shape)}: this transformers cannot "
            "put the target together again; install another, or use --device-map auto"
        )
    return weight


def _gather() -> Any:
    from transformers.integrations import tensor_parallel

    return getattr(tensor_parallel, "gather_state_dict_for_save", None)
