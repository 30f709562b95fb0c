"""Toy languages, trees drawn on them, and exact laws: every random decision of a function taken all ways."""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Callable, Hashable

import torch
from torch import Tensor

from eagle_train.decoding import verify
from eagle_train.decoding.drafters import draw_without_replacement
from eagle_train.decoding.trees import Tree

VOCAB, LENGTH = 4, 4  # tokens of the toy language, tokens whose joint law is compared
Laws = dict[tuple[int, ...], Tensor]
KINDS = ("plain", "holes", "certain", "uniform")


class Replay:
    """A source of chance that follows a script of outcomes and notes the alternatives it did not take."""

    def __init__(self, script: tuple[int, ...]) -> None:
        self.script, self.taken, self.open = script, (), []
        self.probability = 1.0

    def _decide(self, law: list[float]) -> int:
        if len(self.taken) < len(self.script):
            outcome = self.script[len(self.taken)]
        else:
            outcome, *others = (i for i, p in enumerate(law) if p)
            self.open += [(*self.taken, other) for other in others]
        self.taken = (*self.taken, outcome)
        self.probability *= law[outcome]
        return outcome

    def accept(self, probability: float) -> bool:
        probability = min(1.0, probability)
        return bool(self._decide([1 - probability, probability]))

    def choose(self, p: Tensor) -> int:
        return self._decide(p.double().tolist())


def law_of(run: Callable[[Replay], Hashable]) -> dict[Hashable, float]:
    """Return the exact law of run(chance), summed over all outcomes of all its decisions."""
    law: dict[Hashable, float] = defaultdict(float)
    scripts: list[tuple[int, ...]] = [()]
    while scripts:
        chance = Replay(scripts.pop())
        law[run(chance)] += chance.probability
        scripts += chance.open
    return dict(law)


def toy_laws(seed: int, kind: str, vocab: int = VOCAB) -> Laws:
    """A law of the next token [vocab] for every text of up to LENGTH tokens."""
    generator = torch.Generator().manual_seed(seed)
    laws = {}
    for length in range(LENGTH + 1):
        for text in itertools.product(range(vocab), repeat=length):
            law = torch.rand(vocab, generator=generator, dtype=torch.float64) ** 2 + 1e-3
            if kind == "holes":
                law[torch.randperm(vocab, generator=generator)[: vocab // 2]] = 0
            elif kind == "certain":
                law = torch.nn.functional.one_hot(law.argmax(), vocab).double()
            elif kind == "uniform":
                law = torch.ones(vocab, dtype=torch.float64)
            laws[text] = law / law.sum()
    return laws


def opposite(laws: Laws) -> Laws:
    """The laws of a drafter that likes best what the target likes least."""
    turned = {text: 1 / (law + 1e-3) for text, law in laws.items()}
    return {text: law / law.sum() for text, law in turned.items()}


def largest_error(draft, p_laws: Laws, rule=None) -> float:
    """Largest difference between the emitted tokens' joint law and the target's, over texts of LENGTH tokens.

    `draft(chance)` returns a tree, `rule` is a way to verify it (`verify_sampled` by default). What one round
    leaves open is filled up by the target's own law, so that only the round can be wrong.
    """
    rule = rule or verify.verify_sampled
    vocab = len(p_laws[()])

    def run(chance) -> tuple[int, ...]:
        tree = draft(chance)
        path, last = rule(tree, lambda node: p_laws[tree.words(node)], chance)
        return (*(tree.tokens[node] for node in path), last)

    def chances(text: tuple[int, ...], start: int) -> float:
        return math.prod(float(p_laws[text[:i]][text[i]]) for i in range(start, len(text)))

    law: dict[tuple[int, ...], float] = defaultdict(float)
    for emitted, probability in law_of(run).items():
        for rest in itertools.product(range(vocab), repeat=max(0, LENGTH - len(emitted))):
            law[(*emitted, *rest)[:LENGTH]] += probability * chances((*emitted, *rest), len(emitted))
    texts = itertools.product(range(vocab), repeat=LENGTH)
    return max(abs(sum(law.values()) - 1), *(abs(law[text] - chances(text, 0)) for text in texts))


def sampled_chain(q_laws: Laws, gamma: int):
    """Draw `gamma` guesses, each from q after those before."""
    return sampled_siblings(q_laws, (1,) * gamma)


def sampled_siblings(q_laws: Laws, widths: tuple[int, ...]):
    """Draw widths[d] children of every node at depth d from q, one after the other, without replacement."""

    def draft(chance) -> Tree:
        tokens, parents, q = [0], [-1], []
        frontier: list[tuple[int, tuple[int, ...]]] = [(0, ())]
        for width in widths:
            grown = []
            for node, text in frontier:
                q.append(q_laws[text])
                for token in draw_without_replacement(q_laws[text], width, chance):
                    grown.append((len(tokens), (*text, token)))
                    tokens.append(token)
                    parents.append(node)
            frontier = grown
        return Tree(tuple(tokens), tuple(parents), (*q, *[None] * (len(tokens) - len(q))))

    return draft


def spied(drafter) -> list:
    """Collect the trees that a drafter proposes from now on."""
    seen, propose = [], drafter.propose

    def spy():
        seen.append(propose())
        return seen[-1]

    drafter.propose = spy
    return seen
