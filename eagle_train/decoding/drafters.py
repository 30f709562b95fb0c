"""Where guesses come from. A drafter reads verified rows and proposes a tree; verification asks no more."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from eagle_train.decoding.cache import HeadCache
from eagle_train.decoding.reader import Rows
from eagle_train.decoding.sampling import Chance, Sampling, distribution
from eagle_train.decoding.trees import EAGLE1_PATHS, StaticShape, Tree, grow_dynamic, grow_static
from eagle_train.errors import UserError
from eagle_train.heads.disk import Head
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
        """Guess what follows the last token observed; that token is the tree's root."""
        ...


@dataclass(frozen=True)
class Chain:
    """One guess after the other: the head's best when greedy, else drawn from the head's law."""

    gamma: int = 3

    def __post_init__(self) -> None:
        if self.gamma < 1:
            raise UserError(f"chain: got {self.gamma} guesses, wanted at least 1")

    @property
    def figures(self) -> dict[str, object]:
        """How reports name this shape. `nodes` counts the root."""
        return {"draft": "chain", "nodes": self.gamma + 1, "depth": self.gamma}


@dataclass(frozen=True)
class Static:
    """A fixed tree of ranks; the default is EAGLE-1's with 25 guesses."""

    paths: tuple[tuple[int, ...], ...] = EAGLE1_PATHS

    @property
    def figures(self) -> dict[str, object]:
        """How reports name this shape. `nodes` counts the root."""
        return {"draft": "static", "nodes": len(self.paths) + 1, "depth": max(map(len, self.paths))}


@dataclass(frozen=True)
class Dynamic:
    """EAGLE-2's tree, grown each round. `total_tokens` counts the root, `depth` levels of guesses."""

    total_tokens: int = 60
    top_k: int = 10
    depth: int = 8

    def __post_init__(self) -> None:
        for name, least in (("total_tokens", 2), ("top_k", 1), ("depth", 1)):
            if getattr(self, name) < least:
                raise UserError(f"dynamic tree: got {name} {getattr(self, name)}, wanted at least {least}")

    @property
    def figures(self) -> dict[str, object]:
        """How reports name this shape. `nodes` counts the root."""
        return {"draft": "dynamic", "nodes": self.total_tokens, "depth": self.depth, "top_k": self.top_k}


Shape = Chain | Static | Dynamic


class HeadDrafter:
    """Drafts with an EAGLE head, in any shape.

    The head's cache keeps verified rows only, computed from the target's true features; rows of a draft stand
    behind them and are forgotten when the next true rows come. Row t reads (feature[t], embedding of x[t+1])
    and guesses x[t+2]; a drafted row reads (carried output of its parent's row, embedding of its own token).
    """

    def __init__(self, head: Head, target: Target, shape: Shape, sampling: Sampling | None = None) -> None:
        check_fit(head, target)
        self.head = head.to(device=target.device, dtype=target.dtype).eval()
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
        cache, m = self.cache, len(rows.tokens) - 1
        assert rows.start == cache.length, "rows must come in order, each once"
        self._check_length(rows.start + m)
        cache.drafted = 0
        features = rows.last if rows.aux is None else rows.aux
        hidden = self.head.start(features.to(rows.tokens.device))  # (m, F) -> (m, H)
        positions = torch.arange(rows.start, rows.start + m, device=hidden.device)
        mask = None
        if m > 1 and rows.start and self.head.config.num_hidden_layers > 1:
            mask = positions[:, None] < torch.arange(rows.start + m, device=hidden.device)
            mask = torch.zeros_like(mask, dtype=hidden.dtype).masked_fill_(mask, -torch.inf)

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            alone = len(q) == 1  # the last row, which sees everything
            return cache.attend(layer, q, k, v, None if alone else mask, causal=not alone and mask is None)

        last = torch.tensor([m - 1], device=hidden.device)
        # next to row t stands x[t+1]: tokens[1:] are x[start+1] .. x[start+m]
        out = self.head(hidden, self.frozen.embed(rows.tokens[1:]), positions, attend, rows=last)  # (1, H)
        cache.length += m
        self._root, self._outs = rows.tokens[-1], out
        self._seen = torch.zeros(1, 0, dtype=torch.bool, device=hidden.device)
        self._positions = positions[-1:]

    def propose(self) -> Tree:
        """Draft a tree below the last token observed."""
        first = self.head.logits(self._outs[0], self.frozen)  # (D,)
        if isinstance(self.shape, Chain) and not self.sampling.greedy:
            return self._sampled_chain(first, self.shape.gamma)
        if isinstance(self.shape, Dynamic):
            shape = self.shape
            draft_ids, parents, _ = grow_dynamic(
                first,
                self._expand,
                total_tokens=shape.total_tokens,
                top_k=shape.top_k,
                depth=shape.depth,
            )
        else:
            assert self._static is not None
            draft_ids, parents = grow_static(first, self._expand, self._static)
        ids = torch.cat([self._root[None], self.head.target_ids(draft_ids)])
        return Tree(tuple(ids.tolist()), parents)

    def _sampled_chain(self, logits: Tensor, gamma: int) -> Tree:
        """Draw each guess from the head's law after the same temperature, top-k and top-p as the target's."""
        tokens, q = [int(self._root)], []
        for slot in range(gamma):
            law = distribution(logits, self.sampling)  # (D,)
            drawn = torch.tensor([self.chance.choose(law)], device=law.device)
            tokens.append(int(self.head.target_ids(drawn)))
            q.append(law.new_zeros(self.frozen.vocab_size).index_copy_(0, self.head.draft_ids, law))  # (V,)
            if slot + 1 < gamma:
                logits = self._expand(drawn, torch.tensor([slot], device=law.device))[0]
        return Tree(tuple(tokens), tuple(range(-1, gamma)), (*q, None))

    def _expand(self, draft_ids: Tensor, slots: Tensor) -> Tensor:
        """Run the head on k drafted tokens below the rows in `slots`; return their logits [k, D]."""
        cache, k = self.cache, len(draft_ids)
        own = torch.eye(k, dtype=torch.bool, device=slots.device)
        seen = torch.cat([self._seen[slots], own], dim=1)  # (k, drafted + k)
        mask = torch.zeros(k, cache.length + seen.shape[1], dtype=self._outs.dtype, device=slots.device)
        mask[:, cache.length :].masked_fill_(~seen, -torch.inf)
        positions = self._positions[slots] + 1
        out = self.head(
            self.head.carry(self._outs[slots]),
            self.frozen.embed(self.head.target_ids(draft_ids)),
            positions,
            lambda layer, q, key, value: cache.attend(layer, q, key, value, mask, causal=False),
        )  # (k, H)
        cache.drafted += k
        earlier = torch.nn.functional.pad(self._seen, (0, k))
        self._seen = torch.cat([earlier, seen])
        self._outs = torch.cat([self._outs, out])
        self._positions = torch.cat([self._positions, positions])
        return self.head.logits(out, self.frozen)

    def _check_length(self, length: int) -> None:
        longest = self.head.config.max_position_embeddings
        if length > longest and not self._warned:
            self._warned = True
            warnings.warn(
                f"the text has {length} tokens, the head knows positions up to {longest}: "
                "the output stays right, but fewer guesses will be accepted",
                stacklevel=3,
            )


def _static_shape(shape: Shape) -> StaticShape | None:
    if isinstance(shape, Chain):
        return StaticShape.chain(shape.gamma)
    return StaticShape.from_paths(shape.paths) if isinstance(shape, Static) else None


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
