"""The check at the start of extraction: what is stored must give back the target's own logits.

A feature taken at the wrong place, a scaling of the logits that is not known, or a norm applied twice
would otherwise show only as a head that never learns.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from math import sqrt

import torch
from torch import Tensor

from eagle_train.errors import UserError
from eagle_train.shards.codecs import CODECS, decode, encode, rounding
from eagle_train.shards.frozen_target import FrozenTarget
from eagle_train.shards.plan import RowTable
from eagle_train.shards.schema import Setting
from eagle_train.targets.batch import BatchFeatures, RowBatch
from eagle_train.targets.capture import FeatureTap
from eagle_train.targets.load import Target

Bound = Callable[[Tensor, Tensor | None, Tensor], Tensor]

_MOST_LOGITS = 1 << 28
_PIECE = 64  # tokens on which the layers are compared
_SIGMAS = 6.0


def check_start(
    tap: FeatureTap, batch: RowBatch, features: BatchFeatures, table: RowTable, setting: Setting
) -> int:
    """Compare the first batch with the model's own forward; return the number of positions compared.

    At every label position the argmax of the logits rebuilt from the state, as it is and as it is stored,
    must be the model's own, save where its two logits are closer than rounding can move them, and the
    largest logit must have the same value. The tapped layers must equal ``output_hidden_states``. Raises
    UserError naming the row and position where they differ, or the row when all features are NaN.
    """
    target = tap.target
    good = torch.isfinite(features.witness)
    if not bool(good.any()):
        raise UserError(
            f"row {table.row_ids[batch.rows[0]]}: all features of the first batch are NaN or infinite; "
            f"{target.name}{_why_not_finite(target, setting.target['dtype'])}"
        )
    _check_layers(tap, batch.padded[:1, : min(_PIECE, batch.lengths[0])])
    frozen = target.frozen()
    exact = features.label_last.to(frozen.device)
    stored, moved = exact, torch.zeros_like(exact, dtype=torch.float32)
    if not setting.label_top_k:
        stored, moved = (tensor.to(frozen.device) for tensor in _stored(features.label_last, setting))
    compared = 0
    for where, own in _own_logits(target, batch):
        use = good[batch.label_at[where].to(good.device)].to(own.device)
        _compare(frozen, exact[where], 0 * moved[where], own, use, where, batch, table)
        compared += _compare(frozen, stored[where], moved[where], own, use, where, batch, table)
    return compared


def _why_not_finite(target: Target, dtype: str) -> str:
    """Say what is at fault where no feature is finite: a weight, the files as a whole, or the dtype."""
    again = "; fetch its files again, or give another target"
    for name, part in target.model.named_parameters():
        if part.is_meta or not part.is_floating_point():
            continue
        values = target.whole(name, part).detach().float()  # infinite in fp16 may be a number in the file
        if bool(values.isnan().any()) or (dtype == "fp32" and not bool(values.isfinite().all())):
            return f": its weight {name} holds NaN or infinite numbers{again}"
    if dtype == "fp32":
        return f" gives them in fp32 with finite weights: its config may be another model's{again}"
    return f" cannot be run in {dtype} here: try --dtype fp32"


def _stored(states: Tensor, setting: Setting) -> tuple[Tensor, Tensor]:
    """Return states [m, H] as they read back from a shard, and the most that each value has moved."""
    codec = CODECS[setting.codec]
    values, scale = encode(codec, states, 1)
    stored = decode(values, scale)
    if codec.dtype == states.dtype:
        return stored, torch.zeros_like(stored, dtype=torch.float32)
    moved = rounding(codec, stored, scale)
    if codec.scaled:  # and rounded once more, to what the output map reads
        moved = moved + torch.finfo(states.dtype).eps / 2 * stored.abs()
    return stored, moved


def _check_layers(tap: FeatureTap, piece: Tensor) -> None:
    """The tapped streams are Hugging Face's hidden_states[k], and last is hidden_states[-1]."""
    target = tap.target
    if not tap.layer_ids:
        return
    captured = tap.forward(piece)
    with torch.no_grad():
        output = target.run_model(piece, output_hidden_states=True)
    hidden = getattr(output, "hidden_states", None)
    if hidden is None or len(hidden) != target.num_layers + 1:
        return  # a model that does not say; the logits are compared all the same
    assert captured.aux is not None
    streams = captured.aux.split(target.hidden_size, dim=-1)
    for k, stream in zip(tap.layer_ids, streams, strict=True):
        want = hidden[k].to(stream.device).float()
        error = (stream.float() - want).norm() / want.norm().clamp_min(1e-30)
        if not bool(error < 1e-2) and bool(torch.isfinite(want).all()):
            raise UserError(
                f"{target.name}: the stream entering layer {k} differs from the model's hidden_states[{k}] "
                f"by {float(error):.1%}; eagle cannot tap this family, please report it"
            )


def _own_logits(target: Target, batch: RowBatch) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield pieces of (which of the m labels, the model's own logits there [k, V]) from full forwards."""
    ends = torch.tensor(batch.lengths, device=batch.padded.device).cumsum(0)
    label_row = torch.searchsorted(ends, batch.label_at, right=True)  # (m,) in 0..B-1
    starts = ends - torch.tensor(batch.lengths, device=ends.device)
    position = batch.label_at - starts[label_row]  # (m,) within its row
    wanted = position.unique()
    count = max(1, _MOST_LOGITS // (len(batch.padded) * target.vocab_size))
    keeps = "logits_to_keep" in inspect.signature(target.model.forward).parameters
    # positions go where the first layer is; a spread model wants them where its last one is
    keeps = keeps and len(set((getattr(target.model, "hf_device_map", None) or {}).values())) < 2
    for keep in wanted.split(count if keeps else len(wanted)):
        with torch.no_grad():
            arguments = {"logits_to_keep": keep} if keeps else {}
            logits = target.run_model(batch.padded, **arguments).logits
        columns = keep if keeps else torch.arange(logits.shape[1], device=keep.device)
        inside = torch.isin(position, keep).nonzero().squeeze(1)
        column = torch.searchsorted(columns, position[inside])
        yield inside, logits[label_row[inside].to(logits.device), column.to(logits.device)]


def _compare(
    frozen: FrozenTarget,
    hidden: Tensor,
    moved: Tensor,
    own: Tensor,
    use: Tensor,
    where: Tensor,
    batch: RowBatch,
    table: RowTable,
) -> int:
    """Compare logits of `hidden` [k, H] with the model's own [k, V]; return how many positions counted.

    `moved` [k, H] is the most that the codec can have moved each value of `hidden`.
    """
    own = own.to(frozen.device).float()
    rebuilt = frozen.logits(hidden).float()
    own_top, own_id = own.max(-1)
    rebuilt_id = rebuilt.argmax(-1)
    value = rebuilt.gather(-1, own_id[:, None])[:, 0]
    gap = own_top - own.gather(-1, rebuilt_id[:, None])[:, 0]
    bound = _bound(frozen, hidden, moved)
    bad_id = gap > bound(own_id, rebuilt_id, own_top.abs() * 2)
    bad_value = (value - own_top).abs() > bound(own_id, None, own_top.abs())
    bad = (bad_id | bad_value) & use.to(own.device)
    if bool(bad.any()):
        i = int(bad.nonzero()[0, 0])
        at = int(batch.label_at[where[i]])
        ends = torch.tensor(batch.lengths).cumsum(0)
        row = int(torch.searchsorted(ends, at, right=True))
        position = at - (int(ends[row]) - batch.lengths[row])
        raise UserError(
            f"{frozen.target.get('name', 'target')}: logits rebuilt from the stored states disagree with "
            f"the model's own at {int(bad.sum())} of {len(own)} label positions; first at row "
            f"{table.row_ids[batch.rows[row]]}, position {position}: token {int(own_id[i])} "
            f"({float(own_top[i]):.4g}) against {int(rebuilt_id[i])} ({float(value[i]):.4g} for the former). "
            "The output map of this model is not supported; please report it"
        )
    return int(use.sum())


def _bound(frozen: FrozenTarget, hidden: Tensor, moved: Tensor) -> Bound:
    """Return the largest difference that rounding can make between logits of two tokens (or of one).

    The codec moves each of the H values independently by at most `moved`, that is with a standard
    deviation of moved / sqrt(3); the target's own arithmetic rounds each logit in its dtype.
    """
    unit_own = torch.finfo(frozen.dtype).eps / 2
    unit_sum = 4 * sqrt(hidden.shape[-1]) * torch.finfo(torch.float32).eps
    spread = _SIGMAS / sqrt(3.0) * moved + unit_sum * hidden.float().abs()

    def bound(first: Tensor, second: Tensor | None, size: Tensor) -> Tensor:
        weight = frozen.lm_head[first].float()
        if second is not None:
            weight = weight - frozen.lm_head[second].float()
        by_state = (spread * weight).norm(dim=-1) * abs(frozen.logit_scale)
        return by_state + 4 * unit_own * size + unit_sum * size

    return bound
