"""The target as the loop sees it: reads a prompt, a token or a tree, and forgets refused guesses."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import TypeVar

import torch
from torch import Tensor

from eagle_train.decoding.cache import TargetCache, check_cacheable, tree_masks
from eagle_train.decoding.trees import Tree
from eagle_train.targets.capture import Captured, FeatureTap
from eagle_train.targets.lengths import longest_text
from eagle_train.targets.load import Target

Reader = TypeVar("Reader", bound="Tapped")


@dataclass(frozen=True)
class Rows:
    """Rows start..start+m-1 of a text, verified by the target.

    Row t has the token x[t], the token that follows, x[t+1], and the target's features having read x[t].
    """

    start: int
    tokens: Tensor  # int64 [m+1]: x[start] .. x[start+m]; the last is the next root, not read yet
    aux: Tensor | None  # [m, F] captured layers, low to high
    last: Tensor  # [m, H] after the final norm
    own: Tensor | None = None  # [k, H] after the final norm, at the drafter's own nodes of the tree before


class Tapped:
    """A target that is being read. A context manager: the taps on its layers are there only inside."""

    def __init__(self, target: Target, layer_ids: Sequence[int]) -> None:
        check_cacheable(target.config, target.name)
        self.target = target
        self._tap = FeatureTap(target, layer_ids)

    def __enter__(self: Reader) -> Reader:
        self._tap.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._tap.__exit__(kind, error, trace)


class TargetReader(Tapped):
    """One text being read by the target."""

    def __init__(self, target: Target, layer_ids: Sequence[int]) -> None:
        super().__init__(target, layer_ids)
        self.cache = TargetCache()

    def read(self, ids: Sequence[int]) -> Captured:
        """Read tokens one after the other. Features [m, F] and [m, H], without the lm_head."""
        return self._unbatched(self._tap.forward(self._ids(ids), cache=self.cache))

    def read_prompt(self, ids: Sequence[int], chunk: int) -> Iterator[tuple[int, Captured]]:
        """Read a prompt in pieces of at most `chunk` tokens; yield (first position, features) of each."""
        for start in range(0, len(ids), chunk):
            yield start, self.read(ids[start : start + chunk])

    def read_tree(self, tree: Tree) -> Captured:
        """Read all nodes at once: a node sees the text, its ancestors and itself. Features [n, F], [n, H].

        Nodes beyond the target's last position are read at it: no text reaches so far (`check_length`), so
        whatever the target says there is never emitted.
        """
        target, past = self.target, self.cache.length
        positions = past + torch.tensor(tree.depths, device=target.device)
        if (longest := longest_text(target.config)) is not None:
            positions = positions.clamp_max(longest - 1)
        masks = tree_masks(target.config, tree.sees.to(target.device), past, positions, target.dtype)
        return self._unbatched(
            self._tap.forward(
                self._ids(tree.tokens),
                position_ids=positions[None],
                attention_mask=masks,
                cache=self.cache,
            )
        )

    def keep(self, tree: Tree, path: Sequence[int], token: int, captured: Captured) -> Rows:
        """Keep the root and the accepted `path` of a tree just read, forget its other nodes.

        `token` is the one that follows. Returns the kept rows for the drafter.
        """
        start, kept = self.cache.length - len(tree), [0, *path]
        self.cache.keep(start, kept)
        return kept_rows(start, tree, path, token, captured, self.target.device)

    def rows(self, start: int, tokens: Sequence[int], captured: Captured) -> Rows:
        """Join features [m, ..] with the m+1 tokens from `start` on."""
        return Rows(start, self._ids(tokens)[0], captured.aux, captured.last)

    def _ids(self, ids: Sequence[int]) -> Tensor:
        return torch.tensor([list(ids)], device=self.target.device)

    @staticmethod
    def _unbatched(captured: Captured) -> Captured:
        return Captured(None if captured.aux is None else captured.aux[0], captured.last[0])


def kept_rows(
    start: int, tree: Tree, path: Sequence[int], token: int, captured: Captured, device: torch.device
) -> Rows:
    """Return the rows from `start` on of a tree's root and its accepted path; `token` follows them.

    The tokens go to `device`, the features stay where they are.
    """
    kept = [0, *path]
    rows = torch.tensor(kept, device=captured.last.device)
    tokens = torch.tensor([*(tree.tokens[node] for node in kept), token], device=device)
    aux = None if captured.aux is None else captured.aux[rows]
    own = captured.last[len(tree) - tree.own :] if tree.own else None
    return Rows(start, tokens, aux, captured.last[rows], own)
