"""The same block of attention by torch's kernels for GPUs: flash in 16 bits, memory-efficient in float32.

A device is trusted with a head dimension once small blocks agree there with plain arithmetic, forward and
backward; where they do not, or a kernel refuses, that is said once and plain operations do the work.
"""

from __future__ import annotations

import functools
import warnings

import torch
from torch import Tensor
from torch.nn.functional import pad

from eagle_train.heads.plain_attention import per_key_head, per_query_head, plain_backward, plain_forward

_aten = torch.ops.aten
_LARGEST_HEAD_DIM = 256
_ALIGNED = 32  # the memory-efficient kernel's log-sum-exp comes in multiples of these rows
_TOLERANCE = {torch.bfloat16: 3e-2, torch.float16: 5e-3, torch.float32: 2e-3}  # of the largest value


def takes(q: Tensor) -> bool:
    """True where these kernels compute what queries [C, heads, hd] ask for."""
    head_dim = q.shape[-1]
    fits = q.dtype in _TOLERANCE and head_dim % 8 == 0 and head_dim <= _LARGEST_HEAD_DIM
    return q.device.type == "cuda" and fits and trusted(q.device, q.dtype, head_dim)


def forward(q: Tensor, keys: Tensor, values: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    """Return what fused.block_forward says, for q, keys and values of one dtype."""
    keys, values = per_query_head(keys, q), per_query_head(values, q)
    q, keys, values = (_batched(x) for x in (q, keys, values))
    if q.dtype == torch.float32:
        out, lse, *_ = _aten._scaled_dot_product_efficient_attention(
            q, keys, values, None, True, 0.0, causal, scale=scale
        )
    else:
        out, lse, *_ = _aten._scaled_dot_product_flash_attention(
            q, keys, values, 0.0, causal, False, scale=scale
        )
    out = out[0].transpose(0, 1)  # [C, heads, hd]
    return out.float(), lse[0, :, : len(out)].transpose(0, 1)


def backward(
    gradient: Tensor,
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    out: Tensor,
    lse: Tensor,
    causal: bool,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return what fused.block_backward says, in float32."""
    kv_heads, num_keys = keys.shape[1], len(keys)
    keys, values = per_query_head(keys, q), per_query_head(values, q)
    given = [_batched(x.to(q.dtype)) for x in (gradient, q, keys, values)]
    merged, sums = _batched(out.to(q.dtype)), lse.transpose(0, 1)[None].contiguous()  # [1, heads, C]
    if q.dtype == torch.float32:
        beyond = -len(q) % _ALIGNED
        sums = pad(sums, (0, beyond), value=float("inf"))  # no weight on rows that are not there
        unused = torch.zeros((), dtype=torch.int64, device=q.device)
        found = _aten._scaled_dot_product_efficient_attention_backward(
            *given, None, merged, sums, unused, unused, 0.0, [True, True, True, False], causal, scale=scale
        )[:3]
    else:
        state = torch.zeros(2, dtype=torch.uint64, device=q.device)  # of dropout, of which there is none
        found = _aten._scaled_dot_product_flash_attention_backward(
            *given, merged, sums, None, None, len(q), num_keys, 0.0, causal, state, state[0], scale=scale
        )
    dq, dkeys, dvalues = (x[0].transpose(0, 1).float() for x in found)
    return dq, per_key_head(dkeys, kv_heads), per_key_head(dvalues, kv_heads)


@functools.cache
def trusted(device: torch.device, dtype: torch.dtype, head_dim: int) -> bool:
    """True where small blocks, causal and not, come out as from plain operations."""
    try:
        worst = max(_difference(device, dtype, head_dim, causal) for causal in (True, False))
    except RuntimeError as error:
        reason = f"they refuse: {str(error).splitlines()[0]}"
    else:
        if worst <= _TOLERANCE[dtype]:
            return True
        reason = f"they part from plain arithmetic by {worst:.1e} of the largest value"
    warnings.warn(
        f"{device}: attention kernels are left aside for head_dim {head_dim} in "
        f"{str(dtype).removeprefix('torch.')}, {reason}; training is right, but slower",
        stacklevel=2,
    )
    return False


def _difference(device: torch.device, dtype: torch.dtype, head_dim: int, causal: bool) -> float:
    """Return the largest difference from plain arithmetic, in shares of each tensor's largest value."""
    draw = torch.Generator().manual_seed(0)
    queries, others, heads, kv_heads = 45, 45 if causal else 70, 4, 2

    def some(count: int, num_heads: int) -> Tensor:
        return torch.randn(count, num_heads, head_dim, generator=draw).to(device, dtype)

    q, keys, values = some(queries, heads), some(others, kv_heads), some(others, kv_heads)
    gradient, scale = some(queries, heads), head_dim**-0.5
    out, lse = plain_forward(q.float(), keys.float(), values.float(), causal, scale)
    # as after merging with other keys: a larger sum, and an output that is not this block's alone
    merged, total = 0.5 * out + 0.1, lse + 0.7
    got = [*forward(q, keys, values, causal, scale)]
    got += backward(gradient, q, keys, values, merged, total, causal, scale)
    floats = gradient.float(), q.float(), keys.float(), values.float()
    wanted = [out, lse, *plain_backward(*floats, merged, total, causal, scale)]
    pairs = zip(got, wanted, strict=True)
    return max(float((one - two).abs().max() / two.abs().max()) for one, two in pairs)


def _batched(x: Tensor) -> Tensor:
    return x.transpose(0, 1)[None]  # [C, heads, hd] -> [1, heads, C, hd]
