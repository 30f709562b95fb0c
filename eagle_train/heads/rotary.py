"""Rotary position embedding with the target's own settings, computed by transformers' utilities."""

from __future__ import annotations

import reprlib

import torch
from torch import Tensor

from eagle_train.errors import UserError
from eagle_train.heads.config import HeadConfig

_FIXED = ("default", "linear", "llama3", "yarn", "longrope")  # frequencies known before the text is


class Rotary:
    """Tables of cosines and sines, grown on demand; float32 always, whatever the module's dtype."""

    def __init__(self, config: HeadConfig) -> None:
        self._frequencies, self._scaling = frequencies(config)  # [hd/2]
        self._tables: dict[torch.device, tuple[Tensor, Tensor]] = {}

    def __call__(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Return cos and sin, each [.., hd/2] float32, of integer `positions` [..]."""
        device = positions.device
        cos, sin = self._tables.get(device) or self._grow(device, 256)
        wanted = int(positions.max()) + 1 if positions.numel() else 0
        if wanted > len(cos):
            cos, sin = self._grow(device, 2 * wanted)
        return cos[positions], sin[positions]

    def _grow(self, device: torch.device, length: int) -> tuple[Tensor, Tensor]:
        angles = torch.arange(length, dtype=torch.float32)[:, None] * self._frequencies  # [length, hd/2]
        table = (angles.cos() * self._scaling).to(device), (angles.sin() * self._scaling).to(device)
        self._tables[device] = table
        return table


def frequencies(config: HeadConfig) -> tuple[Tensor, float]:
    """Return inverse frequencies [hd/2] float32 and the factor on cos and sin.

    Types whose frequencies change with the length of the text are refused; longrope takes its long
    factors when the head's context exceeds the original one, as engines do.
    """
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    kind = config.rope_parameters["rope_type"]
    if kind not in _FIXED:
        raise UserError(f"head: rope_type '{kind}' is not supported, wanted one of {', '.join(_FIXED)}")
    if config.head_dim < 2 or config.head_dim % 2:
        raise UserError(f"head: head_dim is {config.head_dim}, wanted an even number: RoPE turns pairs")
    try:
        llama = LlamaConfig(
            hidden_size=config.hidden_size,
            num_attention_heads=config.num_attention_heads,
            head_dim=config.head_dim,
            max_position_embeddings=config.max_position_embeddings,
            rope_parameters=dict(config.rope_parameters),
        )
        if kind == "default":
            values, scaling = LlamaRotaryEmbedding.compute_default_rope_parameters(llama)
        else:
            values, scaling = ROPE_INIT_FUNCTIONS[kind](llama, None, seq_len=config.max_position_embeddings)
    except (ArithmeticError, LookupError, RuntimeError, TypeError, ValueError) as error:
        raise UserError(
            f"head: RoPE settings {reprlib.repr(config.rope_parameters)} cannot be computed "
            f"({type(error).__name__}: {reprlib.repr(str(error))}); correct them in config.json"
        ) from error
    return values.float(), float(scaling)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate x [.., heads, hd] by cos, sin [.., hd/2]: halves of a head are the two coordinates."""
    return _Rotate.apply(x, cos.unsqueeze(-2), sin.unsqueeze(-2))


class _Rotate(torch.autograd.Function):
    """A rotation's gradient is the rotation back; nothing of x needs keeping."""

    @staticmethod
    def forward(ctx, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:  # type: ignore[no-untyped-def]
        ctx.save_for_backward(cos, sin)
        return _rotated(x, cos, sin)

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[no-untyped-def]
        cos, sin = ctx.saved_tensors
        return _rotated(gradient, cos, -sin), None, None


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    low, high = x.chunk(2, dim=-1)
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    half = x.shape[-1] // 2
    out[..., :half] = low * cos - high * sin
    out[..., half:] = high * cos + low * sin
    return out
