"""Names, dtypes and shapes of a shard's tensors, flat and ragged.

Legend: N tokens, R rows, S spans, M label positions, k likeliest tokens, H hidden size.

    input_ids int32 [N]; loss_mask uint8 [N]; rows int64 [R] (numbers in the prepared rows);
    row_starts int64 [R+1]; spans int64 [S, 2], [first, last] within their row; span_starts int64 [R+1];
    aux [N, len(layer_ids) * H] (eagle3, all); last [M, H] (eagle3, medusa) or [N, H] (eagle1, all);
    aux_scale float32 [N, len(layer_ids)], last_scale float32 [M or N, 1] (8-bit codecs, codecs.py);
    label_argmax int32 [M]; label_lse float32 [M].

With top labels (eagle3 alone, whose heads read ``last`` for nothing but the labels) the shard holds no last:

    label_ids int32 [M, k], the k likeliest tokens of the whole vocabulary, the label_argmax first;
    label_logp [M, k], their log-probabilities over all of it: float32 with codec fp32, else float16.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import prod

import torch

from eagle_train.shards.codecs import CODECS
from eagle_train.shards.schema import Setting, holds_all_last, holds_aux


def tensor_shapes(
    setting: Setting, num_rows: int, num_spans: int, num_tokens: int, num_labels: int
) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
    """Return dtype and shape of every tensor of a shard of these counts."""
    codec, hidden, layers = CODECS[setting.codec], setting.hidden_size, len(setting.layer_ids)
    num_last = num_tokens if holds_all_last(setting.features) else num_labels
    top = setting.label_top_k
    shapes: dict[str, tuple[torch.dtype, tuple[int, ...]]] = {
        "input_ids": (torch.int32, (num_tokens,)),
        "loss_mask": (torch.uint8, (num_tokens,)),
        "rows": (torch.int64, (num_rows,)),
        "row_starts": (torch.int64, (num_rows + 1,)),
        "spans": (torch.int64, (num_spans, 2)),
        "span_starts": (torch.int64, (num_rows + 1,)),
        "label_argmax": (torch.int32, (num_labels,)),
        "label_lse": (torch.float32, (num_labels,)),
    }
    if top:
        exact = codec.dtype == torch.float32
        shapes["label_ids"] = (torch.int32, (num_labels, top))
        shapes["label_logp"] = (torch.float32 if exact else torch.float16, (num_labels, top))
    else:
        shapes["last"] = (codec.dtype, (num_last, hidden))
    if codec.scaled and not top:
        shapes["last_scale"] = (torch.float32, (num_last, 1))
    if holds_aux(setting.features):
        shapes["aux"] = (codec.dtype, (num_tokens, layers * hidden))
        if codec.scaled:
            shapes["aux_scale"] = (torch.float32, (num_tokens, layers))
    return shapes


def tensor_bytes(shapes: Mapping[str, tuple[torch.dtype, tuple[int, ...]]]) -> int:
    """Return the bytes of tensors of these dtypes and shapes."""
    return sum(dtype.itemsize * prod(shape) for dtype, shape in shapes.values())
