"""Where guesses come from. A drafter reads verified rows and proposes a tree; verification asks no more."""

from __future__ import annotations

import warnings
from collections.abc import Generator
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from eagle_train.decoding.asking import answered
from eagle_train.decoding.cache import HeadCache
from eagle_train.decoding.reader import Rows
from eagle_train.decoding.sampling import Chance, Sampling, distribution, without
from eagle_train.decoding.shapes import Chain, Dynamic, Sampled, Shape, Static
from eagle_train.decoding.trees import Rows as Growth
from eagle_train.decoding.trees import StaticShape, Tree, growing_dynamic, growing_static
from eagle_train.errors import UserError
from eagle_train.heads.disk import EagleHead, Head
from eagle_train.heads.layer import Attend
from eagle_train.heads.medusa import MedusaHead
from eagle_train.targets.load import Target


class Drafter(Protocol):
    """A way of guessing: a new method is one class of this form."""

    layer_ids: tuple[int, ...]
    """Target layers (hs ids) whose states `Rows.aux` shall hold; () for none."""

    def begin(self, chance: Chance) -> None:
        """Forget everything: a new text starts. Draws come from `chance`."""
        ...

    def observe(self, rows: Rows) -> None:
        """Take note of rows that the target has verified. Rows come in order, each once."""
        ...

    def propose(self) -> Tree:
        """Guess what follows the last token observed; that token is the tree's root.

        The tree says how its guesses were drawn, and may end in nodes of the drafter's own, which the target
        reads in the same forward and nobody verifies.
        """
        ...


@dataclass(frozen=True)
class Reading:
    """Verified rows that a head is about to read, m of them."""

    features: Tensor  # [m, F]
    next_tokens: Tensor  # int64 [m], beside each row the token that follows
    positions: Tensor  # int64 [m]
    attend: Attend


@dataclass(frozen=True)
class Step:
    """Drafted rows that a head is about to read, k of them."""

    outs: Tensor  # [k, H], of the rows they continue
    tokens: Tensor  # int64 [k], target ids
    positions: Tensor  # int64 [k]
    attend: Attend
    seen: Tensor  # bool [k, drafted + k], the drafted rows that each one sees


class HeadDrafter:
    """Drafts with an EAGLE head, in any shape.

    The head's cache keeps verified rows only, computed from the target's true features; rows of a draft stand
    behind them and are forgotten when the next true rows come. Row t reads (feature[t], embedding of x[t+1])
    and guesses x[t+2]; a drafted row reads (carried output of its parent's row, embedding of its own token).
    """

    def __init__(self, head: Head, target: Target, shape: Shape, sampling: Sampling | None = None) -> None:
        if isinstance(head, MedusaHead):
            raise UserError("Medusa heads: got one where an EAGLE head is wanted; use eagle eval")
        check_fit(head, target)
        self.head: EagleHead = head.to(device=target.device, dtype=target.dtype).eval()
        self.frozen = target.frozen()
        self.layer_ids = head.config.layers_for(target.num_layers)
        self.shape = shape
        self.sampling = sampling or Sampling()
        self._static = _static_shape(shape)
        self._warned = False

    def begin(self, chance: Chance) -> None:
        """Forget the text."""
        self.chance = chance
        self.cache = HeadCache()

    def observe(self, rows: Rows) -> None:
        """Read true features into the cache; keep the last row's output, it guesses the root's children."""
        reading = self.reading(rows)
        last = torch.tensor([len(reading.positions) - 1], device=reading.features.device)
        hidden = self.head.start(reading.features)  # (m, F) -> (m, H)
        embeds = self.frozen.embed(reading.next_tokens)
        out = self.head(hidden, embeds, reading.positions, reading.attend, rows=last)  # (1, H)
        self.has_read(reading, out)

    def reading(self, rows: Rows) -> Reading:
        """Return what the head shall read of verified rows; the present draft is forgotten."""
        cache, m = self.cache, len(rows.tokens) - 1
        assert rows.start == cache.length, "rows must come in order, each once"
        self._check_length(rows.start + m)
        cache.drafted = 0
        features = (rows.last if rows.aux is None else rows.aux).to(rows.tokens.device)
        positions = torch.arange(rows.start, rows.start + m, device=features.device)
        mask = self._rows_mask(positions, rows.start, m, self.frozen.embedding.dtype)

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            seen = None if mask is None else mask[-len(q) :]
            return cache.attend(layer, q, k, v, seen, causal=len(q) > 1 and mask is None)

        # next to row t stands x[t+1]: tokens[1:] are x[start+1] .. x[start+m]
        return Reading(features, rows.tokens[1:], positions, attend)

    def has_read(self, reading: Reading, out: Tensor) -> None:
        """Take note of the output [1, H] at the last row of a reading."""
        self.cache.length += len(reading.positions)
        self._root, self._outs = reading.next_tokens[-1], out
        self._seen = torch.zeros(1, 0, dtype=torch.bool, device=out.device)
        self._positions = reading.positions[-1:]

    def _rows_mask(self, positions: Tensor, start: int, m: int, dtype: torch.dtype) -> Tensor | None:
        """Return the additive mask of m true rows [m or 1, start + m]; None where plain causality does.

        With one layer the last row alone asks; without a window it sees everything.
        """
        layers, window = self.head.config.num_hidden_layers, self.head.config.sliding_window
        narrow = window is not None and start + m > window
        if not narrow and not (layers > 1 and m > 1 and start):
            return None
        asking = positions if layers > 1 else positions[-1:]
        ahead = torch.arange(start + m, device=positions.device) - asking[:, None]
        hidden = ahead > 0
        if window is not None:
            hidden |= ahead <= -window
        return torch.zeros_like(hidden, dtype=dtype).masked_fill_(hidden, -torch.inf)

    def propose(self) -> Tree:
        """Draft a tree below the last token observed."""
        first = self.head.logits(self._outs[0], self.frozen)  # (D,)
        return answered(self.drafting(first), lambda rows: self.expand(*rows))

    @property
    def last_out(self) -> Tensor:
        """The head's output [H] at the last verified row."""
        return self._outs[0]

    def drafting(self, first: Tensor) -> Generator[Growth, Tensor, Tree]:
        """`propose` from the logits [D] of the last verified row, yielding the rows to expand."""
        shape = self.shape
        if isinstance(shape, Chain) and (shape.stop or not self.sampling.greedy):
            return (yield from self._sampled(first, (1,) * shape.gamma, shape.stop))
        if isinstance(shape, Sampled) and not self.sampling.greedy:
            return (yield from self._sampled(first, shape.widths))
        if isinstance(shape, Dynamic):
            sizes = {"total_tokens": shape.total_tokens, "top_k": shape.top_k, "depth": shape.depth}
            draft_ids, parents, _ = yield from growing_dynamic(first, **sizes)
        else:
            assert self._static is not None
            draft_ids, parents = yield from growing_static(first, self._static)
        ids = torch.cat([self._root[None], self.head.target_ids(draft_ids)])
        return Tree(tuple(ids.tolist()), parents)

    def _sampled(
        self, logits: Tensor, widths: tuple[int, ...], stop: float = 0.0
    ) -> Generator[Growth, Tensor, Tree]:
        """Draw children from the head's law after the target's temperature, top-k and top-p.

        `logits` [D] are those of the last verified row. Whether guess i of a chain is made depends on the law
        it would be drawn from and on earlier guesses, never on its own value: sampling stays lossless.
        """
        tokens, parents, q = [int(self._root)], [-1], []
        nodes, slots, rows = [0], [0], logits[None]  # (k, D)
        first_slot, reach = 1, 1.0
        for depth, width in enumerate(widths):
            if stop and reach * float(rows[0].float().softmax(-1).amax()) < stop:
                break
            drawn, below, grown = [], [], []
            for node, slot, law in zip(nodes, slots, distribution(rows, self.sampling), strict=True):
                q.append(self._over_targets(law))
                for draft_id in draw_without_replacement(law, width, self.chance):
                    grown.append(len(tokens))
                    tokens.append(int(self.head.target_ids(torch.tensor(draft_id))))
                    parents.append(node)
                    drawn.append(draft_id)
                    below.append(slot)
            if stop:
                reach *= float(rows[0].float().softmax(-1)[drawn[0]])
            nodes = grown
            if depth + 1 < len(widths):
                at = self._root.device
                rows = yield torch.tensor(drawn, device=at), torch.tensor(below, device=at)
                slots = list(range(first_slot, first_slot + len(drawn)))
                first_slot += len(drawn)
        return Tree(tuple(tokens), tuple(parents), (*q, *[None] * (len(tokens) - len(q))))

    def draft_level(self, rows: int) -> None:
        """Draft `rows` tokens below the last verified row and forget them: for measuring the time."""
        ids = torch.zeros(rows, dtype=torch.int64, device=self._root.device)
        kept = (self._outs, self._seen, self._positions)
        self.expand(ids, ids).float().log_softmax(-1).topk(1)
        self.cache.drafted = 0
        self._outs, self._seen, self._positions = kept

    def _over_targets(self, law: Tensor) -> Tensor:
        """Spread a law [D] over the target's vocabulary, [V]."""
        return law.new_zeros(self.frozen.vocab_size).index_copy_(0, self.head.draft_ids, law)

    def expand(self, draft_ids: Tensor, slots: Tensor) -> Tensor:
        """Run the head on k drafted tokens below the rows in `slots`; return their logits [k, D]."""
        step = self.step(draft_ids, slots)
        embeds = self.frozen.embed(step.tokens)
        out = self.head(self.head.carry(step.outs), embeds, step.positions, step.attend)  # (k, H)
        self.has_drafted(step, out)
        return self.head.logits(out, self.frozen)

    def step(self, draft_ids: Tensor, slots: Tensor) -> Step:
        """Return what the head shall read of k drafted tokens below the rows in `slots`."""
        cache, k = self.cache, len(draft_ids)
        own = torch.eye(k, dtype=torch.bool, device=slots.device)
        seen = torch.cat([self._seen[slots], own], dim=1)  # (k, drafted + k)
        mask = torch.zeros(k, cache.length + seen.shape[1], dtype=self._outs.dtype, device=slots.device)
        mask[:, cache.length :].masked_fill_(~seen, -torch.inf)
        positions = self._positions[slots] + 1
        if (window := self.head.config.sliding_window) is not None:
            verified = torch.arange(cache.length, device=slots.device)
            behind = positions[:, None] - torch.cat([verified, self._positions[1:], positions])
            mask.masked_fill_(behind >= window, -torch.inf)

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return cache.attend(layer, q, k, v, mask, causal=False)

        return Step(self._outs[slots], self.head.target_ids(draft_ids), positions, attend, seen)

    def has_drafted(self, step: Step, out: Tensor) -> None:
        """Take note of a step's outputs [k, H]: rows in the next free slots."""
        self.cache.drafted += len(out)
        earlier = torch.nn.functional.pad(self._seen, (0, len(out)))
        self._seen = torch.cat([earlier, step.seen])
        self._outs = torch.cat([self._outs, out])
        self._positions = torch.cat([self._positions, step.positions])

    def _check_length(self, length: int) -> None:
        longest = self.head.config.max_position_embeddings
        if length > longest and not self._warned:
            self._warned = True
            warnings.warn(
                f"the text has {length} tokens, the head knows positions up to {longest}: "
                "the output stays right, but fewer guesses will be accepted",
                stacklevel=3,
            )


def draw_without_replacement(law: Tensor, number: int, chance: Chance) -> list[int]:
    """Return up to `number` tokens drawn one after the other from `law` [D] without those drawn before.

    As many as the law has possible tokens at most.
    """
    drawn: list[int] = []
    for _ in range(min(number, int((law > 0).sum()))):
        drawn.append(chance.choose(law))
        if len(drawn) < number:
            law = without(law, drawn[-1])
    return drawn


def _static_shape(shape: Shape) -> StaticShape | None:
    if isinstance(shape, Chain):
        return StaticShape.chain(shape.gamma)
    return StaticShape.from_paths(shape.paths) if isinstance(shape, Static | Sampled) else None


def check_fit(head: Head, target: Target) -> None:
    """Refuse a head made for a target of other sizes."""
    config = head.config
    for what, got, wanted in (
        ("vocabulary", config.vocab_size, target.vocab_size),
        ("hidden size", config.target_hidden_size or config.hidden_size, target.hidden_size),
        ("embedding width", config.hidden_size, target.embedding.shape[-1]),
    ):
        if got != wanted:
            raise UserError(
                f"head for {config.target or 'another target'}: its {what} is {got}, that of {target.name} "
                f"is {wanted}; evaluate it on the target it was trained for"
            )
