"""A head's first layer started from one of the target's own decoder layers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from eagle_train.errors import UserError
from eagle_train.heads.disk import Head
from eagle_train.heads.eagle3 import Eagle3Head
from eagle_train.targets.load import load_target
from eagle_train.targets.packed import dense

if TYPE_CHECKING:
    from eagle_train.shards.row_source import RowSource

_COPIED = (
    "self_attn.o_proj.weight",
    "mlp.gate_proj.weight",
    "mlp.up_proj.weight",
    "mlp.down_proj.weight",
    "post_attention_layernorm.weight",
)
_WIDENED = ("self_attn.q_proj.weight", "self_attn.k_proj.weight", "self_attn.v_proj.weight")
_NORMS = ("self_attn.q_norm.weight", "self_attn.k_norm.weight")


def start_from_layer(head: Head, shards: RowSource, index: int) -> None:
    """Copy layer `index` (from 0) of the shards' target into the head's first layer.

    An EAGLE-3 layer reads the embedding beside the hidden state: the target's q, k and v become the half
    that reads the hidden state, the other half starts at zero. Raises UserError where the target is not the
    one the shards were made with, or its layer is not a Llama layer of the head's shape.
    """
    where = f"head.init_layer {index}"
    record = shards.info["target"]
    target = load_target(str(record["name"]), device="cpu")
    if target.fingerprint != record["fingerprint"]:
        raise UserError(f"{where}: {target.name} is not the target that {shards.folder} was made with")
    if not index < target.num_layers:
        raise UserError(f"{where}: {target.name} has layers 0 to {target.num_layers - 1}")
    eagle3 = isinstance(head, Eagle3Head)
    layer: Any = head.midlayer if isinstance(head, Eagle3Head) else next(iter(head.layers))  # type: ignore[arg-type]
    parameters = dict(layer.named_parameters())
    stored = {name: dense(value).float() for name, value in target.layers[index].state_dict().items()}
    wanted = {name: stored.get(name) for name in (*_COPIED, *(n for n in _NORMS if n in parameters))}
    for name in _WIDENED:
        wanted[name] = _widened(stored.get(name), parameters[name]) if eagle3 else stored.get(name)
    if eagle3:
        wanted["hidden_norm.weight"] = stored.get("input_layernorm.weight")
    known = {*_COPIED, *_WIDENED, *_NORMS, "input_layernorm.weight"}
    odd = sorted(name for name in stored if name not in known and not name.endswith("_proj.bias"))
    odd += sorted(
        name for name, value in wanted.items() if value is None or value.shape != parameters[name].shape
    )
    if odd or target.config.model_type.startswith("gemma"):  # whose norms mean 1 + weight
        what = f"its {odd[0]}" if odd else "its norms"
        raise UserError(
            f"{where}: layer {index} of {target.name} is no Llama layer of the head's shape: {what}"
        )
    with torch.no_grad():
        for name, value in wanted.items():
            parameters[name].copy_(value)  # type: ignore[arg-type]


def _widened(weight: Tensor | None, like: Tensor) -> Tensor | None:
    """[.., H] -> [.., 2H]: zeros for the embedding, then the weight."""
    if weight is None or 2 * weight.shape[1] != like.shape[1]:
        return weight
    return torch.cat([torch.zeros_like(weight), weight], dim=1)
