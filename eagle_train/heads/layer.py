"""One decoder layer of a head, as in Llama, whose attention is left to the caller."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import cast

from torch import Tensor, nn

from eagle_train.heads.config import HeadConfig
from eagle_train.heads.norm import RMSNorm
from eagle_train.heads.rotary import rotate

# attend(layer, q [.., heads, hd], k [.., kv heads, hd], v) -> [.., heads, hd]. q and k are rotated already;
# the caller owns keys, caches and masks. With `rows`, q holds those rows alone, k and v hold all.
Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]


class Attention(nn.Module):
    """Projections around an attention that the caller computes. Reads `width` wide inputs."""

    def __init__(self, config: HeadConfig, width: int, index: int) -> None:
        super().__init__()
        hd, bias = config.head_dim, config.attention_bias
        self.index, self.head_dim = index, hd
        self.q_proj = nn.Linear(width, config.num_attention_heads * hd, bias=bias)
        self.k_proj = nn.Linear(width, config.num_key_value_heads * hd, bias=bias)
        self.v_proj = nn.Linear(width, config.num_key_value_heads * hd, bias=bias)
        self.o_proj = nn.Linear(config.num_attention_heads * hd, config.hidden_size, bias=bias)
        self.q_norm = RMSNorm(hd, config.rms_norm_eps) if config.qk_norm else nn.Identity()
        self.k_norm = RMSNorm(hd, config.rms_norm_eps) if config.qk_norm else nn.Identity()

    def forward(
        self, x: Tensor, angles: tuple[Tensor, Tensor], attend: Attend, rows: Tensor | None
    ) -> Tensor:
        cos, sin = angles
        k = rotate(self.k_norm(self._heads(self.k_proj(x))), cos, sin)
        v = self._heads(self.v_proj(x))
        if rows is not None:
            x, cos, sin = x[rows], cos[rows], sin[rows]
        q = rotate(self.q_norm(self._heads(self.q_proj(x))), cos, sin)
        return self.o_proj(attend(self.index, q, k, v).flatten(-2))

    def _heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (-1, self.head_dim))  # [.., heads * hd] -> [.., heads, hd]


class MLP(nn.Module):
    """Llama's gated feed-forward."""

    def __init__(self, config: HeadConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(nn.functional.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    """Attention and feed-forward with their residuals; what attention reads is given apart.

    `own_norm` gives the layer an input norm on the residual stream (every layer but the first).
    """

    def __init__(self, config: HeadConfig, index: int, *, width: int, own_norm: bool) -> None:
        super().__init__()
        if own_norm:
            self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = Attention(config, width, index)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = MLP(config)

    def forward(
        self,
        inputs: Tensor,  # [.., width], what q, k and v are projected from
        residual: Tensor,  # [.., H]
        angles: tuple[Tensor, Tensor],
        attend: Attend,
        rows: Tensor | None = None,
    ) -> Tensor:
        """Return the new residual stream [.., H], of `rows` alone where given."""
        attended = self.self_attn(inputs, angles, attend, rows)
        residual = (residual if rows is None else residual[rows]) + attended
        return residual + self.mlp(self.post_attention_layernorm(residual))


def run_further_layers(
    layers: Collection[nn.Module],
    hidden: Tensor,
    angles: tuple[Tensor, Tensor],
    attend: Attend,
    rows: Tensor | None,
) -> Tensor:
    """Run ordinary Llama layers over the residual stream; only the last is narrowed to `rows`."""
    for number, module in enumerate(layers, 1):
        layer, last = cast("Layer", module), number == len(layers)
        hidden = layer(layer.input_layernorm(hidden), hidden, angles, attend, rows if last else None)
    return hidden
