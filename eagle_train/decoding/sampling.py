"""Which law a token is drawn from, and where the randomness comes from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from eagle_train.decoding.processors import Processors
from eagle_train.errors import UserError
from eagle_train.targets.generation import BY_TEXT

LOWEST_TEMPERATURE = 1e-4


@dataclass(frozen=True)
class Sampling:
    """Repetition penalty, temperature, top-k and top-p, applied in this order.

    Temperature 0 is greedy; top_k 0 keeps all; a repetition penalty of 1 changes nothing. `processors` are
    the target's own: those of the text come after the penalty, those of the law after top-p.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    repetition_penalty: float = 1.0
    processors: Processors | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.temperature < float("inf"):
            raise UserError(f"temperature: got {self.temperature}, wanted 0 (greedy) or more")
        if 0 < self.temperature < LOWEST_TEMPERATURE:
            raise UserError(
                f"temperature: got {self.temperature}, wanted at least {LOWEST_TEMPERATURE:g}; 0 is greedy"
            )
        if self.top_k < 0:
            raise UserError(f"top-k: got {self.top_k}, wanted 0 (off) or more")
        if not 0 < self.top_p <= 1:
            raise UserError(
                f"top-p: got {self.top_p}, wanted a number above 0, at most 1; temperature 0 is greedy"
            )
        if not 0 < self.repetition_penalty < float("inf"):
            raise UserError(
                f"repetition-penalty: got {self.repetition_penalty}, wanted a number above 0 (1 is off)"
            )

    @property
    def greedy(self) -> bool:
        """True when every token is the most probable one."""
        return self.temperature == 0

    @property
    def reads_text(self) -> bool:
        """True when logits depend on the text before, not only through the model."""
        own = self.processors
        return self.repetition_penalty != 1 or (own is not None and not own.values.keys().isdisjoint(BY_TEXT))


def distribution(logits: Tensor, sampling: Sampling) -> Tensor:
    """Return the law of the next token, float [.., V], after temperature, top-k and top-p.

    Works on any leading shape, one-dimensional logits included. At least one token always stays, so a top_p
    near 0 is greedy. float64 logits stay float64, all others give float32. Ties at the k-th value stay, as
    in transformers.
    """
    logits = _wide(logits)
    if sampling.greedy:
        return torch.nn.functional.one_hot(logits.argmax(-1), logits.shape[-1]).to(logits.dtype)
    # Relative to the largest, and divided by a number of the dtype: neither inf - inf nor 0 / 0 can come out.
    temperature = _within(sampling.temperature, torch.finfo(logits.dtype))
    logits = (logits - logits.amax(-1, keepdim=True)) / temperature
    if 0 < sampling.top_k < logits.shape[-1]:
        smallest = logits.topk(sampling.top_k, dim=-1).values[..., -1:]
        logits = logits.masked_fill(logits < smallest, -torch.inf)
    p = logits.softmax(-1)
    if sampling.top_p < 1:
        ordered, order = p.sort(dim=-1, descending=True, stable=True)
        before = ordered.cumsum(-1) - ordered  # the mass of all tokens ranked above this one
        dropped = before >= sampling.top_p
        dropped[..., 0] = False
        p = p.masked_fill(torch.zeros_like(dropped).scatter(-1, order, dropped), 0)
        p = p / p.sum(-1, keepdim=True)
    return p if sampling.processors is None else sampling.processors.of_the_law(p)


def _wide(logits: Tensor) -> Tensor:
    return logits if logits.dtype == torch.float64 else logits.float()


def _within(value: float, limits: torch.finfo) -> float:
    """Return the nearest number above 0 that a dtype holds in full precision."""
    return min(max(value, limits.tiny), limits.max)


def processed(logits: Tensor, text: Sequence[int], sampling: Sampling, begun: int) -> Tensor:
    """Return logits [V] after the penalty and the target's own processors; the answer began at `begun`."""
    logits = penalised(logits, text, sampling.repetition_penalty)
    own = sampling.processors
    return logits if own is None else own.by_text(logits, text, begun)


def penalised(logits: Tensor, text: Sequence[int], penalty: float) -> Tensor:
    """Return logits [V], those of tokens in `text` divided by `penalty`, or times it where below 0.

    Finite logits stay finite. Source: CTRL (arXiv 1909.05858), section 4.1, in the form of transformers.
    """
    if penalty == 1:
        return logits
    seen = torch.tensor(sorted(set(text)), device=logits.device)
    old, limits = _wide(logits[seen]), torch.finfo(logits.dtype)
    penalty = _within(penalty, torch.finfo(old.dtype))
    new = torch.where(old < 0, old * penalty, old / penalty).clamp(limits.min, limits.max)
    return logits.index_copy(0, seen, new.to(logits.dtype))


def without(law: Tensor, token: int) -> Tensor:
    """Return the law once `token` is out of the question; the law itself where nothing else was possible."""
    rest = law.clone()
    rest[token] = 0
    return scaled(rest, law)


def scaled(weights: Tensor, otherwise: Tensor) -> Tensor:
    """Return weights / sum; `otherwise` where no weight is left, which rounding alone can bring about."""
    total = weights.sum()
    return weights / total if total > 0 else otherwise


class Chance(Protocol):
    """Where random decisions come from: a generator in use, an enumeration of all outcomes in the tests."""

    def accept(self, probability: float) -> bool:
        """Return True with this probability (values above 1 count as 1)."""
        ...

    def choose(self, p: Tensor) -> int:
        """Return an index drawn from the law `p` [V]."""
        ...


class SeededChance:
    """Random decisions from one seed, the same on every device for the same laws."""

    def __init__(self, seed: int) -> None:
        self._generator = torch.Generator().manual_seed(seed)

    def _uniform(self) -> float:
        return torch.rand((), generator=self._generator, dtype=torch.float64).item()

    def accept(self, probability: float) -> bool:
        """Return True with this probability; a probability of 0 is never accepted, of 1 always."""
        return self._uniform() < probability

    def choose(self, p: Tensor) -> int:
        """Draw by inverting the cumulative law, in float64 so that 100,000 small terms add up right."""
        cumulative = p.double().cumsum(0)
        point = self._uniform() * cumulative[-1]
        index = int(torch.searchsorted(cumulative, point, right=True))
        return min(index, int(p.nonzero()[-1])) if index >= len(p) else index
