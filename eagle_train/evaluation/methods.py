"""The ways of decoding that can be compared, by name: each a drafter for one and the same loop."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eagle_train.decoding.draft_model import DraftModel, first_layers
from eagle_train.decoding.drafters import Drafter, HeadDrafter
from eagle_train.decoding.lookahead import Lookahead
from eagle_train.decoding.medusa import MedusaDrafter, usual_tree
from eagle_train.decoding.prompt_lookup import PromptLookup
from eagle_train.decoding.sampling import Sampling
from eagle_train.decoding.shapes import Dynamic, Shape, Static
from eagle_train.errors import UserError, nearest
from eagle_train.evaluation.heads import open_head
from eagle_train.heads.disk import Head
from eagle_train.heads.medusa import MedusaHead
from eagle_train.targets.load import Target, load_target

HEAD_KINDS = {
    "medusa": "medusa",
    "eagle1": "eagle1",
    "eagle2": "eagle1",
    "eagle3": "eagle3",
}  # method -> kind of its head
METHODS = ("plain", "draft-model", "prompt-lookup", "lookahead", *HEAD_KINDS)


@dataclass(frozen=True)
class Method:
    """What ``--method NAME[=SOURCE]`` says; SOURCE is a head or, for draft-model, a model or ``first:N``."""

    name: str
    source: str | None = None

    @classmethod
    def parse(cls, text: str, head: str | None = None) -> Method:
        """Read one ``--method``. A head method without a source takes `head`. Raises UserError."""
        name, equals, source = text.partition("=")
        if name not in METHODS:
            raise UserError(f"--method {text}: wanted one of {', '.join(METHODS)}{nearest(name, METHODS)}")
        takes = name in HEAD_KINDS or name == "draft-model"
        if equals and not (takes and source):
            raise UserError(
                f"--method {text}: wanted {name}{'=DIR' if takes else ' alone, it reads nothing'}"
            )
        if takes and not source and (name == "draft-model" or head is None):
            what = "a model" if name == "draft-model" else "a head"
            raise UserError(f"--method {name}: needs {what}; give --method {name}=DIR")
        return cls(name, source or (head if takes else None))


@dataclass(frozen=True)
class Sizes:
    """Sizes of the methods that need no head; None is each one's usual."""

    gamma: int | None = None  # guesses of a draft model, prompt-lookup and chains
    window: int | None = None  # of lookahead, as are the two below
    level: int | None = None
    guesses: int | None = None


@dataclass
class Entry:
    """One line of a comparison."""

    method: str
    source: str | None
    drafter: Drafter
    tree: dict[str, Any]
    kind: str | None = None  # of the head, where there is one


def entries_of_head(
    head: str | Path | Head,
    target: Target,
    shapes: Sequence[Shape] | None,
    sampling: Sampling,
) -> list[Entry]:
    """Return one entry for each shape of a head's drafts, its usual one where `shapes` is None."""
    # a copy: it is cast below
    loaded = open_head(head, target) if isinstance(head, str | Path) else copy.deepcopy(head)
    source = str(head) if isinstance(head, str | Path) else "as given"
    return _entries(loaded.config.kind, source, loaded, target, shapes, sampling)


def _entries(
    method: str,
    source: str,
    head: Head,
    target: Target,
    shapes: Sequence[Shape] | None,
    sampling: Sampling,
) -> list[Entry]:
    """Return the entries of a head of one's own, which is cast to the target's dtype."""
    return [
        Entry(method, source, head_drafter(head, target, shape, sampling), shape.figures, head.config.kind)
        for shape in shapes or [usual_shape(head)]
    ]


def head_drafter(head: Head, target: Target, shape: Shape, sampling: Sampling) -> HeadDrafter | MedusaDrafter:
    """Return what drafts with a head of any kind."""
    if isinstance(head, MedusaHead):
        return MedusaDrafter(head, target, shape)
    return HeadDrafter(head, target, shape, sampling)


def usual_shape(head: Head) -> Shape:
    """Return a static tree for Medusa and EAGLE-1 heads, EAGLE-2's dynamic tree for EAGLE-3 heads."""
    if head.config.kind == "medusa":
        return usual_tree(head.config.medusa_heads)
    return Static() if head.config.kind == "eagle1" else Dynamic()


def entries_of(
    method: Method,
    target: Target,
    shapes: Sequence[Shape] | None,
    sampling: Sampling,
    sizes: Sizes,
) -> list[Entry]:
    """Return the entries of a named method; none for ``plain``, which every comparison holds."""
    if method.name == "plain":
        return []
    if method.name in HEAD_KINDS:
        return _entries_of_named_head(method, target, shapes, sampling)
    drafter = _drafter(method, target, sampling, sizes)
    return [Entry(method.name, method.source, drafter, drafter.figures)]


def _drafter(
    method: Method, target: Target, sampling: Sampling, sizes: Sizes
) -> DraftModel | PromptLookup | Lookahead:
    gamma = {} if sizes.gamma is None else {"gamma": sizes.gamma}
    if method.name == "draft-model":
        assert method.source is not None
        return DraftModel(_draft_model(method.source, target), target, sampling=sampling, **gamma)
    if method.name == "prompt-lookup":
        return PromptLookup(**gamma)
    window = {name: getattr(sizes, name) for name in ("window", "level", "guesses")}
    return Lookahead(target, **{name: value for name, value in window.items() if value is not None})


def _draft_model(source: str, target: Target) -> Target:
    """Load a draft model beside the target; ``first:N`` is the target's own first N layers."""
    start, _, number = source.partition(":")
    if start == "first" and number.isdecimal():
        return first_layers(target, int(number))
    if ":" in source and not Path(source).exists():
        raise UserError(f"--method draft-model={source}: wanted a model, or first:N (layers of the target)")
    code = target.trust_remote_code
    return load_target(source, dtype=target.dtype, device=target.device, trust_remote_code=code)


def _entries_of_named_head(
    method: Method,
    target: Target,
    shapes: Sequence[Shape] | None,
    sampling: Sampling,
) -> list[Entry]:
    assert method.source is not None
    head = open_head(method.source, target)
    wanted = HEAD_KINDS[method.name]
    if head.config.kind != wanted:
        raise UserError(
            f"--method {method.name}={method.source}: an {head.config.kind} head, wanted {wanted}; "
            f"give --method {head.config.kind}={method.source}"
        )
    if shapes is None:
        shapes = [Dynamic(depth=6)] if method.name == "eagle2" else [usual_shape(head)]
    return _entries(method.name, method.source, head, target, shapes, sampling)
