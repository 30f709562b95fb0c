"""How a head's guesses are laid out: the records that name a shape and its size."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from pathlib import Path

from eagle_train.decoding.trees import EAGLE1_PATHS, StaticShape
from eagle_train.errors import UserError
from eagle_train.io.text import read_json, write_json

MOST_NODES = 1024  # that a target reads in one round, the root counted
MOST_GUESSES = 256  # one after the other
MOST_ROWS = 2048  # that a head drafts in one round


def check_size(got: str, value: object, least: int = 1, most: int = MOST_GUESSES) -> None:
    """Raise UserError for a size that is no whole number from `least` to `most`.

    `got` is the beginning of its text, ``{}`` standing for the value.
    """
    words = got.format(repr(value)[:20])
    if isinstance(value, bool) or not isinstance(value, int):
        raise UserError(f"{words}, wanted a whole number")
    if not least <= value <= most:
        raise UserError(f"{words}, wanted {f'at least {least}' if value < least else f'at most {most}'}")


@dataclass(frozen=True)
class Chain:
    """One guess after the other: the head's best when greedy, else drawn from the head's law.

    With `stop` above 0 no guess is made that the head expects to stand with a lower probability; `gamma`
    is then the most guesses of a round.
    """

    gamma: int = 3
    stop: float = 0.0

    def __post_init__(self) -> None:
        check_size("chain: got {} guesses", self.gamma)
        if not 0 <= self.stop < 1:
            raise UserError(f"chain: got stop {self.stop}, wanted a probability from 0 (never) to below 1")

    @property
    def figures(self) -> dict[str, object]:
        """How reports name this shape. `nodes` counts the root."""
        stop = {"stop": self.stop} if self.stop else {}
        return {"draft": "chain", "nodes": self.gamma + 1, "depth": self.gamma, **stop}


@dataclass(frozen=True)
class Static:
    """A fixed tree of ranks; the default is EAGLE-1's with 25 guesses."""

    paths: tuple[tuple[int, ...], ...] = EAGLE1_PATHS

    def __post_init__(self) -> None:
        check_size("static tree: got {} nodes with its root", len(self.paths) + 1, 2, MOST_NODES)
        for rank in (rank for path in self.paths for rank in path):
            check_size("static tree: got a rank of {}", rank, 0, 2**31)

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
        for name, least, most in (
            ("total_tokens", 2, MOST_NODES),
            ("top_k", 1, MOST_NODES),
            ("depth", 1, 256),
        ):
            check_size(f"dynamic tree: got {name} {{}}", getattr(self, name), least, most)
        check_size("dynamic tree: got top_k times depth {}", self.top_k * self.depth, 1, MOST_ROWS)

    @property
    def figures(self) -> dict[str, object]:
        """How reports name this shape. `nodes` counts the root."""
        return {"draft": "dynamic", "nodes": self.total_tokens, "depth": self.depth, "top_k": self.top_k}


@dataclass(frozen=True)
class Sampled:
    """A tree of samples: every node at depth d has `widths[d]` children, drawn without replacement.

    Greedy, they are the head's best instead. A law with fewer possible tokens gives fewer children.
    """

    widths: tuple[int, ...] = (4, 2, 1, 1)

    def __post_init__(self) -> None:
        if not self.widths:
            raise UserError("sampled tree: got no widths, wanted at least one child a level")
        check_size("sampled tree: got {} levels", len(self.widths))
        for width in self.widths:
            check_size("sampled tree: got a width of {}", width, 1, MOST_NODES)
        check_size("sampled tree: got {} nodes with its root", self._nodes, 1, MOST_NODES)

    @property
    def _nodes(self) -> int:
        return 1 + sum(math.prod(self.widths[: d + 1]) for d in range(len(self.widths)))

    @property
    def paths(self) -> tuple[tuple[int, ...], ...]:
        """The same tree as paths of ranks."""
        levels: list[list[tuple[int, ...]]] = [[()]]
        for width in self.widths:
            levels.append([(*path, rank) for path in levels[-1] for rank in range(width)])
        return tuple(path for level in levels[1:] for path in level)

    @property
    def figures(self) -> dict[str, object]:
        """How reports name this shape. `nodes` counts the root."""
        return {"draft": "sampled", "nodes": self._nodes, "depth": len(self.widths)}


Shape = Chain | Static | Dynamic | Sampled
_KINDS: dict[str, type[Shape]] = {"chain": Chain, "static": Static, "dynamic": Dynamic, "sampled": Sampled}


def write_shape(path: str | Path, shape: Shape) -> None:
    """Write a shape as JSON that `read_shape` takes."""
    write_json(path, {"draft": shape.figures["draft"], **dataclasses.asdict(shape)})


def read_shape(path: str | Path) -> Shape:
    """Read what `write_shape` wrote. Raises UserError naming the file."""
    values = read_json(path, "write one with eagle tune --out")
    kind = _KINDS.get(str(values.pop("draft", None)))
    if kind is None:
        raise UserError(f"{path}: no draft of a known kind, wanted 'draft': one of {', '.join(_KINDS)}")
    try:
        if kind is Static:
            values["paths"] = tuple(map(tuple, values["paths"]))
        if kind is Sampled:
            values["widths"] = tuple(values["widths"])
        shape = kind(**values)
        if isinstance(shape, Static):
            StaticShape.from_paths(shape.paths)
        return shape
    except (TypeError, KeyError, ValueError, AttributeError, OverflowError, UserError) as error:
        raise UserError(f"{path}: not a shape of eagle tune ({error}); write it anew") from error
