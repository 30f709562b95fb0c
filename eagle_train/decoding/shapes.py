"""How a head's guesses are laid out: the records that name a shape and its size."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from pathlib import Path

from eagle_train.decoding.trees import EAGLE1_PATHS, StaticShape
from eagle_train.errors import UserError
from eagle_train.io import read_json, write_json


@dataclass(frozen=True)
class Chain:
    """One guess after the other: the head's best when greedy, else drawn from the head's law.

    With `stop` above 0 no guess is made that the head expects to stand with a lower probability; `gamma`
    is then the most guesses of a round.
    """

    gamma: int = 3
    stop: float = 0.0

    def __post_init__(self) -> None:
        if self.gamma < 1:
            raise UserError(f"chain: got {self.gamma} guesses, wanted at least 1")
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


@dataclass(frozen=True)
class Sampled:
    """A tree of samples: every node at depth d has `widths[d]` children, drawn without replacement.

    Greedy, they are the head's best instead. A law with fewer possible tokens gives fewer children.
    """

    widths: tuple[int, ...] = (4, 2, 1, 1)

    def __post_init__(self) -> None:
        if not self.widths or min(self.widths) < 1:
            raise UserError(f"sampled tree: got widths {self.widths}, wanted at least one child a level")

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
        nodes = 1 + sum(math.prod(self.widths[: d + 1]) for d in range(len(self.widths)))
        return {"draft": "sampled", "nodes": nodes, "depth": len(self.widths)}


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
            values["paths"] = tuple(tuple(int(rank) for rank in path) for path in values["paths"])
            StaticShape.from_paths(values["paths"])
        if kind is Sampled:
            values["widths"] = tuple(int(width) for width in values["widths"])
        return kind(**values)
    except (TypeError, KeyError, ValueError) as error:
        raise UserError(f"{path}: not a shape of eagle tune ({error}); write it anew") from error
