"""How states are stored: as they are, in 16 bits, or in 8 bits with a scale for each token and layer.

Legend: n tokens, G layers side by side, H hidden size. The 8-bit codecs divide the H values of one token
and layer by a scale that takes their largest to the codec's largest, so one outlier costs its own token
and layer alone. Values are rounded to the nearest; nothing is clipped.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from eagle_train.errors import UserError, nearest

_NIL = 1e-30  # scales below are none: dividing by them is not exact on every device


@dataclass(frozen=True)
class Codec:
    """One way to store a value. Errors are bounds of |stored - true|."""

    dtype: torch.dtype
    relative: float  # error as a share of the value
    absolute: float = 0.0  # error next to zero, in units of the scale
    largest: float | None = None  # what a vector's largest value is scaled to; None: no scale

    @property
    def scaled(self) -> bool:
        """True when a scale is stored beside the values."""
        return self.largest is not None


CODECS = {
    "bf16": Codec(torch.bfloat16, relative=2.0**-8),
    "fp32": Codec(torch.float32, relative=2.0**-24),
    "fp8": Codec(torch.float8_e4m3fn, relative=2.0**-4, absolute=2.0**-10, largest=448.0),
    "int8": Codec(torch.int8, relative=0.0, absolute=0.5, largest=127.0),
}


def check_codec(codec: str) -> str:
    """Return `codec`; raise UserError for an unknown one."""
    if codec not in CODECS:
        raise UserError(f"--codec {codec}: wanted one of {', '.join(CODECS)}{nearest(codec, CODECS)}")
    return codec


def check_top_labels(top_k: int, features: str, vocab_size: int) -> int:
    """Return `top_k`; raise UserError where top labels cannot stand for the states, or for too many."""
    if top_k and features != "eagle3":
        raise UserError(
            f"--label-top-k {top_k}: --for {features} keeps the last states, which heads of eagle1 and "
            "medusa read; leave it out, or extract --for eagle3"
        )
    if top_k > vocab_size:
        raise UserError(f"--label-top-k {top_k}: the target has {vocab_size} tokens; wanted at most as many")
    return top_k


def refuse_top_labels(kind: str, top_k: int, where: str) -> None:
    """Raise UserError where a head of `kind` reads states that shards with top labels do not hold."""
    if kind != "eagle3":
        raise UserError(
            f"{where}: holds the {top_k} likeliest tokens of each label in place of its state, which {kind} "
            f"heads read. Re-run: eagle extract --for {kind}, without --label-top-k"
        )


def encode(codec: Codec, states: Tensor, groups: int) -> tuple[Tensor, Tensor | None]:
    """Return (values [n, G * H], scales float32 [n, G] or None) of states [n, G * H], G = `groups`."""
    if codec.largest is None:
        return states.to(codec.dtype), None
    parts = states.float().unflatten(-1, (groups, -1))  # (n, G * H) -> (n, G, H)
    scale = parts.abs().amax(-1) / codec.largest
    scale = torch.where(scale <= _NIL, 1.0, scale)  # (n, G); all zeros stay zeros, NaN stays NaN
    parts = parts / scale[..., None]
    if not codec.dtype.is_floating_point:
        parts = parts.round()
    values = parts.clamp(-codec.largest, codec.largest).to(codec.dtype)
    return values.flatten(-2), scale


def decode(values: Tensor, scale: Tensor | None, dtype: torch.dtype | None = None) -> Tensor:
    """Return states [n, G * H] from what `encode` returned.

    Scaled values come in `dtype`, float32 when None; others as they are stored, without a copy.
    """
    if scale is None:
        return values
    parts = values.float().unflatten(-1, (scale.shape[-1], -1))  # (n, G * H) -> (n, G, H)
    return (parts * scale[..., None]).flatten(-2).to(dtype or torch.float32)


def rounding(codec: Codec, stored: Tensor, scale: Tensor | None) -> Tensor:
    """Return, for each decoded value [n, H] of one layer, the most that storing can have moved it."""
    bound = codec.relative * stored.float().abs()
    if scale is not None:
        bound = bound.maximum(codec.absolute * scale)
    return bound
