"""Trees of guesses: the record that verification reads, and the two ways to choose their shape.

A shape grows by yielding a few rows for the head to run on, and is sent their logits: so nothing here knows
what a head is, and the trees of several texts can grow in step.
"""

from __future__ import annotations

import heapq
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from eagle_train.errors import UserError

Rows = tuple[Tensor, Tensor]
"""What a growing tree yields: draft ids [k] and parent slots [k]. It is sent their logits [k, D].

Slot 0 is the last verified row, which guesses the root's children. Each asking appends k rows, which take the
next free slots in order; a row reads its own token and continues the row in its parent's slot.
"""


@dataclass(frozen=True)
class Tree:
    """Guesses to be verified in one forward of the target.

    Node 0 is the root, the last emitted token. `parents[0]` is -1 and every parent comes before its children.
    `q` says how the children were drawn: None, they are not samples of a known law (verified by the target's
    own probabilities alone); otherwise `q[i]`, float [V], is the law that the children of node i were drawn
    from, without replacement and in node order (None for a leaf). The last `own` nodes are the drafter's own:
    the target reads them with the others, for the drafter to see its outputs there; no rule looks at them.
    """

    tokens: tuple[int, ...]
    parents: tuple[int, ...]
    q: tuple[Tensor | None, ...] | None = None
    own: int = 0

    def __len__(self) -> int:
        return len(self.tokens)

    @cached_property
    def depths(self) -> tuple[int, ...]:
        """The number of guesses from the root to each node, the root's being 0."""
        depths: list[int] = []
        for parent in self.parents:
            depths.append(0 if parent < 0 else depths[parent] + 1)
        return tuple(depths)

    @cached_property
    def children(self) -> tuple[tuple[int, ...], ...]:
        """The guesses below each node, in node order."""
        children: list[list[int]] = [[] for _ in self.parents]
        for node in range(1, len(self) - self.own):
            children[self.parents[node]].append(node)
        return tuple(map(tuple, children))

    @property
    def is_chain(self) -> bool:
        """True when every guess hangs below the one before it."""
        guesses = len(self) - self.own
        return self.parents[:guesses] == tuple(range(-1, guesses - 1))

    def path(self, node: int) -> list[int]:
        """The nodes from the root's child down to `node`; [] for the root."""
        path: list[int] = []
        while node > 0:
            path.append(node)
            node = self.parents[node]
        return path[::-1]

    def words(self, node: int) -> tuple[int, ...]:
        """The guesses on the way from the root, itself left out, down to `node`."""
        return tuple(self.tokens[i] for i in self.path(node))

    @cached_property
    def sees(self) -> Tensor:
        """bool [n, n]: row i is true on node i and on its ancestors."""
        sees = np.eye(len(self), dtype=bool)
        for node, parent in enumerate(self.parents[1:], start=1):
            sees[node] |= sees[parent]
        return torch.from_numpy(sees)


@dataclass(frozen=True)
class StaticShape:
    """A fixed tree: node i (the root is 0) is the guess of rank `ranks[i]` below `parents[i]`.

    Nodes stand in the order (depth, path), as in the reference's tree buffers.
    """

    parents: tuple[int, ...]
    ranks: tuple[int, ...]
    depths: tuple[int, ...]

    @classmethod
    def from_paths(cls, paths: Sequence[Sequence[int]]) -> StaticShape:
        """Build from paths of ranks, e.g. (0, 2) for the third best child of the best first guess.

        Raises UserError for an empty list, a repeated path or a path whose parent is not in the list.
        """
        ordered = sorted((tuple(path) for path in paths), key=lambda path: (len(path), path))
        if not ordered:
            raise UserError("static tree: got no paths, wanted at least one such as [0]")
        number: dict[tuple[int, ...], int] = {(): 0}
        for path in ordered:
            if path in number:
                raise UserError(f"static tree: path {list(path)} is there twice, wanted each path once")
            if path[:-1] not in number or min(path) < 0:
                raise UserError(
                    f"static tree: path {list(path)} has no parent {list(path[:-1])}; add the parent's path"
                )
            number[path] = len(number)
        return cls(
            parents=(-1, *(number[path[:-1]] for path in ordered)),
            ranks=(0, *(path[-1] for path in ordered)),
            depths=(0, *(len(path) for path in ordered)),
        )

    @classmethod
    def chain(cls, gamma: int) -> StaticShape:
        """The chain of `gamma` best guesses."""
        if gamma < 1:
            raise UserError(f"chain: got {gamma} guesses, wanted at least 1")
        return cls.from_paths([(0,) * depth for depth in range(1, gamma + 1)])

    @cached_property
    def paths(self) -> tuple[tuple[int, ...], ...]:
        """The ranks from the root down to each node but the root, in node order."""
        paths: list[tuple[int, ...]] = [()]
        for parent, rank in zip(self.parents[1:], self.ranks[1:], strict=True):
            paths.append((*paths[parent], rank))
        return tuple(paths[1:])

    @cached_property
    def levels(self) -> tuple[tuple[Tensor, Tensor, int, tuple[int, ...]], ...]:
        """What to grow at each depth: row of each node's parent in the last logits, ranks, their number, and
        which new nodes have children and are expanded, numbered within their depth."""
        inner = set(self.parents)
        row_of = {0: 0}
        levels = []
        for depth in range(1, max(self.depths) + 1):
            nodes = [node for node, at in enumerate(self.depths) if at == depth]
            rows = torch.tensor([row_of[self.parents[node]] for node in nodes])
            ranks = torch.tensor([self.ranks[node] for node in nodes])
            expanded = [i for i, node in enumerate(nodes) if node in inner]
            row_of = {nodes[i]: row for row, i in enumerate(expanded)}
            levels.append((rows, ranks, int(ranks.max()) + 1, tuple(expanded)))
        return tuple(levels)


# The reference's default for EAGLE-1 (mc_sim_7b_63): 4, 8, 8, 3 and 2 nodes per depth.
EAGLE1_PATHS: tuple[tuple[int, ...], ...] = (
    *((0,), (1,), (2,), (3,)),
    *((0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (2, 0), (2, 1), (3, 0)),
    *((0, 0, 0), (0, 0, 1), (0, 0, 2), (0, 1, 0), (0, 1, 1), (0, 2, 0), (0, 2, 1), (1, 0, 0)),
    *((0, 0, 0, 0), (0, 0, 0, 1), (0, 0, 0, 2)),
    *((0, 0, 0, 0, 0), (0, 0, 0, 0, 1)),
)


def growing_static(
    logits: Tensor, shape: StaticShape
) -> Generator[Rows, Tensor, tuple[Tensor, tuple[int, ...]]]:
    """Fill a fixed shape with the best-ranked tokens. `logits` [D] are those of the last verified row.

    Returns the draft ids of nodes 1.. (int64 [n-1]) and all parents. A draft vocabulary with fewer tokens
    than the highest rank is refused.
    """
    needed = max(shape.ranks) + 1
    if needed > logits.shape[-1]:
        raise UserError(
            f"static tree: got {logits.shape[-1]} draft tokens, wanted {needed} for its ranks; use a chain"
        )
    rows_of_logits = logits[None]  # (1, D)
    first_slot, next_slot, tokens = 0, 1, []
    for rows, ranks, width, expanded in shape.levels:
        rows, ranks = rows.to(logits.device), ranks.to(logits.device)
        best = rows_of_logits.topk(width, dim=-1).indices  # (k, ranks)
        tokens.append(best[rows, ranks])
        if expanded:
            chosen = torch.tensor(expanded, device=logits.device)
            rows_of_logits = yield tokens[-1][chosen], first_slot + rows[chosen]
            first_slot, next_slot = next_slot, next_slot + len(expanded)
    return torch.cat(tokens), shape.parents


def growing_dynamic(
    logits: Tensor, *, total_tokens: int, top_k: int, depth: int
) -> Generator[Rows, Tensor, tuple[Tensor, tuple[int, ...], Tensor]]:
    """Grow EAGLE-2's tree: the nodes of highest cumulative log-probability under the head.

    At each of `depth` levels the `top_k` best nodes get `top_k` children each (at most D); of all nodes found
    the `total_tokens - 1` best are kept, in order of discovery. `logits` [D] are those of the last verified
    row. Returns draft ids of nodes 1.. (int64 [n-1]), all parents, and the kept nodes' scores [n-1].
    Source: EAGLE-2, section 4.

    A child never scores above its parent and is found after it, so a stable sort keeps parents first even in
    ties; and once no frontier node beats the worst kept node, nothing below can enter, so growing stops.
    """
    keep = total_tokens - 1
    width = min(top_k, logits.shape[-1])  # children of a node
    beam_scores, beam_ids = logits.float().log_softmax(-1).topk(width)  # (k,)
    scores, ids = beam_scores, beam_ids
    parents = torch.full_like(ids, -1)  # index into scores/ids; -1 the root
    beam_nodes, beam_slots = torch.arange(width, device=ids.device), torch.zeros_like(ids)
    next_slot = 1
    for _ in range(1, depth):
        if len(scores) >= keep and beam_scores[0] <= scores.topk(keep).values[-1]:
            break
        rows = yield beam_ids, beam_slots  # (k, D)
        child_scores, child_ids = rows.float().log_softmax(-1).topk(width)  # (k, width)
        child_scores, child_ids = (beam_scores[:, None] + child_scores).flatten(), child_ids.flatten()
        found, best = len(scores), child_scores.sort(descending=True, stable=True).indices[:top_k]
        parents = torch.cat([parents, beam_nodes.repeat_interleave(width)])
        scores, ids = torch.cat([scores, child_scores]), torch.cat([ids, child_ids])
        beam_slots, next_slot = next_slot + best // width, next_slot + len(rows)
        beam_nodes, beam_scores, beam_ids = found + best, child_scores[best], child_ids[best]
    kept = scores.sort(descending=True, stable=True).indices[:keep].sort().values
    number = {-1: 0} | {node: i for i, node in enumerate(kept.tolist(), start=1)}
    return ids[kept], (-1, *(number[parent] for parent in parents[kept].tolist())), scores[kept]


def best_paths(rates: Sequence[Sequence[float]], guesses: int) -> tuple[tuple[int, ...], ...]:
    """Return the `guesses` paths that a static tree should hold: those most likely to stand.

    `rates[d][r]` is the probability that the guess of rank r at depth d+1 is right where its parent is; a
    path stands with the product of its own. Fewer paths where there are no more. Source: Medusa, 2.3.3.
    """
    found: list[tuple[int, ...]] = []
    open_paths: list[tuple[float, tuple[int, ...]]] = [(-rate, (rank,)) for rank, rate in enumerate(rates[0])]
    heapq.heapify(open_paths)
    while open_paths and len(found) < guesses:
        worth, path = heapq.heappop(open_paths)
        found.append(path)
        if len(path) < len(rates):
            for rank, rate in enumerate(rates[len(path)]):
                heapq.heappush(open_paths, (worth * rate, (*path, rank)))
    return tuple(sorted(found, key=lambda path: (len(path), path)))
