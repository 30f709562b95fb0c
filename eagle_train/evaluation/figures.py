"""Pooled figures of one way of drafting, beside plain decoding on the same prompts."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from eagle_train.decoding.loop import Generation
from eagle_train.losses.acceptance import AcceptanceCounts

Key = TypeVar("Key", int, str)


class Classes(Generic[Key]):
    """Rounds by a key of theirs, such as a category; an empty one is of the class ``none``."""

    def __init__(self) -> None:
        self._sums: dict[Key, list[float]] = defaultdict(lambda: [0, 0])

    def add(self, key: Key, emitted: float, rounds: float = 1) -> None:
        """Count a round, or an expected number of them, that emitted so many tokens in all."""
        sums = self._sums[key]
        sums[0] += rounds
        sums[1] += emitted

    @property
    def taus(self) -> dict[str, float]:
        """Tokens per round of each class, by its name, in the order of the keys; nothing if all are empty."""
        pooled: dict[str, list[float]] = {}
        for key, (rounds, tokens) in sorted(self._sums.items(), key=lambda item: (item[0] == "", item[0])):
            sums = pooled.setdefault(self._name(key), [0, 0])  # some key may itself be the word none
            sums[0] += rounds
            sums[1] += tokens
        if set(self._sums) == {""}:
            return {}
        return {name: tokens / rounds for name, (rounds, tokens) in pooled.items() if rounds}

    def _name(self, key: Key) -> str:
        return str(key) or "none"


class SizeClasses(Classes[int]):
    """Rounds by how many tokens stood before them, in classes 1, 2-3, 4-7, .."""

    def add(self, key: int, emitted: float, rounds: float = 1) -> None:
        """Count rounds before which `key` tokens stood."""
        super().add(key.bit_length(), emitted, rounds)

    def _name(self, key: int) -> str:
        return "1" if key == 1 else f"{2 ** (key - 1)}-{2**key - 1}"


@dataclass(frozen=True)
class ByKind:
    """Rounds by the category of their prompt, and by where in the answer and in the text they began."""

    category: Classes[str] = field(default_factory=Classes)
    place: SizeClasses = field(default_factory=SizeClasses)
    context: SizeClasses = field(default_factory=SizeClasses)

    def add(self, category: str, place: int, context: int, emitted: float, rounds: float = 1) -> None:
        """Count rounds that began `place` tokens into the answer, `context` tokens into the text."""
        self.category.add(category, emitted, rounds)
        self.place.add(place, emitted, rounds)
        self.context.add(context, emitted, rounds)

    @property
    def figures(self) -> dict[str, dict[str, float]]:
        """Acceptance lengths under the names of ``--json``; names of sizes say from where to where."""
        return {
            "tau_by_category": self.category.taus,
            "tau_by_place": self.place.taus,
            "tau_by_context": self.context.taus,
        }


@dataclass
class Tally:
    """Sums over the answers of one method."""

    new_tokens: int = 0  # the prefill's tokens included
    decoded_tokens: int = 0
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0
    counts: AcceptanceCounts = field(default_factory=AcceptanceCounts)
    accepted_uncut: int = 0
    by_kind: ByKind = field(default_factory=ByKind)

    def add(self, made: Generation, category: str, prompt: int = 0) -> None:
        """Pool one answer to a prompt of that many tokens."""
        self.new_tokens += len(made.ids)
        self.decoded_tokens += len(made.ids) - 1
        self.prefill_seconds += made.prefill_seconds
        self.decode_seconds += made.decode_seconds
        if made.accepted:
            self.counts += made.counts
        for place, emitted in made.rounds:
            self.by_kind.add(category, place, prompt + place, emitted)
        self.accepted_uncut += sum(made.accepted_uncut)

    @property
    def tokens_per_second(self) -> float:
        """Decoding only: the prefill's time and its one token are left out."""
        return self.decoded_tokens / self.decode_seconds if self.decode_seconds else 0.0

    @property
    def tokens_per_second_with_prefill(self) -> float:
        """All new tokens over all time."""
        seconds = self.prefill_seconds + self.decode_seconds
        return self.new_tokens / seconds if seconds else 0.0


def acceptance_figures(counts: AcceptanceCounts, depth: int) -> dict[str, Any]:
    """Return the acceptance figures under the names of ``--json``; lists run over positions 1..depth."""
    padded = counts + AcceptanceCounts(histogram=(0,) * (depth + 1))
    return {
        "tau": padded.tau,
        "rounds": padded.rounds,
        "tokens": padded.tokens,
        "accepted_by_position": list(padded.accepted_by_position),
        "accepted_given_previous": list(padded.accepted_given_previous),
        "accepted_histogram": list(padded.histogram),
    }


def method_figures(tally: Tally, plain: Tally, tree: dict[str, Any]) -> dict[str, Any]:
    """Return one method's figures. `plain` is the tally of plain decoding on the same prompts.

    `vllm_acceptance_length` is 1 + accepted guesses / rounds with the guesses past an answer's end counted,
    as vLLM's counters have it; `sglang_acceptance_length` is completion tokens / rounds, the prefill's token
    counted, as SGLang reports it. `round_cost` is the time of a round over that of a plain token: speculation
    wins where tau is larger.
    """
    rounds = tally.counts.rounds
    seconds_per_round = tally.decode_seconds / rounds if rounds else 0.0
    plain_rate, rate = plain.tokens_per_second, tally.tokens_per_second
    plain_whole = plain.tokens_per_second_with_prefill
    whole = tally.tokens_per_second_with_prefill
    return {
        **acceptance_figures(tally.counts, tree["depth"]),
        "vllm_acceptance_length": 1 + tally.accepted_uncut / rounds if rounds else 1.0,
        "sglang_acceptance_length": tally.new_tokens / rounds if rounds else 1.0,
        "tokens_per_second": rate,
        "plain_tokens_per_second": plain_rate,
        "speedup": rate / plain_rate if plain_rate else 0.0,
        "speedup_with_prefill": whole / plain_whole if plain_whole else 0.0,
        "seconds_per_round": seconds_per_round,
        "round_cost": seconds_per_round * plain_rate,
        **tally.by_kind.figures,
        "tree": tree,
    }
