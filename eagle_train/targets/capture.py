"""Hidden states of the frozen target, taken by hooks on its layers, without running the lm_head.

Legend of this room: B batch, T time, H hidden size, V vocabulary, n layers. ``hs[k]`` is the residual
stream entering layer k (``hs[0]`` = what the first layer reads), Hugging Face ``hidden_states[k]``, k < n.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import torch
from torch import Tensor

from eagle_train.errors import UserError
from eagle_train.targets.load import Target


@dataclass(frozen=True)
class Captured:
    """What one forward leaves behind."""

    aux: Tensor | None  # (B, T, len(layer_ids) * H), low layer first; aux[t]: having read token t
    last: Tensor  # (B, T, H) after the final norm: what the lm_head reads


def default_layer_ids(num_layers: int) -> tuple[int, int, int]:
    """Return the three layers of EAGLE-3, ``(2, n // 2, n - 3)`` in the hs convention.

    Raises UserError for n < 7, where they would not be three distinct layers.
    """
    if num_layers < 7:
        raise UserError(
            f"the target has {num_layers} layers; the default 2, n//2, n-3 are distinct only from 7 on; "
            "give three: eagle extract --layers 0,1,2, or head.layer_ids of the recipe"
        )
    return 2, num_layers // 2, num_layers - 3


def check_layer_ids(layer_ids: Sequence[int], num_layers: int) -> tuple[int, ...]:
    """Return `layer_ids` as a tuple; raise UserError unless they ascend within 0..n-1."""
    ids = tuple(int(k) for k in layer_ids)
    if list(ids) != sorted(set(ids)) or (ids and (ids[0] < 0 or ids[-1] >= num_layers)):
        raise UserError(
            f"layers {', '.join(map(str, ids))}: wanted ascending distinct numbers in 0..{num_layers - 1} "
            f"(k = the residual stream entering layer k of the target's {num_layers})"
        )
    return ids


class FeatureTap:
    """Runs the target's body and keeps ``hs[k]`` of the chosen layers.

    Use as a context manager; the hooks are there only inside it::

        with FeatureTap(target, (2, 15, 27)) as tap:
            captured = tap.forward(input_ids)
            logits = target.logits(captured.last[0, -1])
    """

    def __init__(self, target: Target, layer_ids: Sequence[int]) -> None:
        self.target = target
        self.layer_ids = check_layer_ids(layer_ids, target.num_layers)
        self._seen: dict[int, Tensor] = {}
        self._handles: list[Any] = []

    def __enter__(self) -> FeatureTap:
        for k in self.layer_ids:
            layer = self.target.layers[k]
            self._handles.append(layer.register_forward_pre_hook(self._keep(k), with_kwargs=True))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._seen.clear()

    def _keep(self, k: int) -> Callable[..., None]:
        def hook(module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            self._seen[k] = args[0] if args else kwargs["hidden_states"]

        return hook

    def forward(
        self,
        input_ids: Tensor,
        *,
        position_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        cache: Any = None,
    ) -> Captured:
        """Run the body on `input_ids` (int64 [B, T]) and return its features, on the last layer's device.

        `cache` is a transformers Cache, extended in place. A 4-D `attention_mask` must be additive float.
        Without a mask attention is causal: rows padded on the right are right at their real positions.
        """
        if len(self._handles) != len(self.layer_ids):
            raise RuntimeError("FeatureTap.forward outside `with tap:`")
        self._seen.clear()
        with torch.no_grad():
            last = self.target.run_body(
                input_ids, position_ids=position_ids, attention_mask=attention_mask, cache=cache
            )
        if not self.layer_ids:
            return Captured(None, last)
        streams = [self._seen[k].to(last.device) for k in self.layer_ids]
        self._seen.clear()
        return Captured(torch.cat(streams, dim=-1), last)
