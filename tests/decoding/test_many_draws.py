"""The shipped loops with the shipped source of chance, drawn many times and held against the law.

The target is a table: what it says depends on the last two tokens alone, so that a forward costs nothing and
100,000 texts are drawn, in batches. Loops, law, verification, sampling and trees are the shipped ones. With a
fixed seed each test either always passes or never; a right loop would fail one of 1,000 seeds.
"""

from __future__ import annotations

import copy
import itertools
from collections import Counter
from types import SimpleNamespace

import pytest
import torch

from eagle_train.decoding import batch, loop
from eagle_train.decoding.batch import Job, generate_together
from eagle_train.decoding.drafters import draw_without_replacement
from eagle_train.decoding.loop import Settings, generate
from eagle_train.decoding.reader import Rows, kept_rows
from eagle_train.decoding.sampling import Sampling, SeededChance, distribution
from eagle_train.decoding.trees import Tree
from eagle_train.targets.capture import Captured

VOCAB, LENGTH, PROMPT = 5, 3, [1, 4, 2]
SAMPLING = Sampling(0.9, top_p=0.95)
LOGITS = torch.randn(VOCAB, VOCAB, VOCAB, generator=torch.Generator().manual_seed(4), dtype=torch.float64)
DRAFT = 2 * torch.randn(VOCAB, VOCAB, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
LAWS = distribution(LOGITS, SAMPLING)
DRAFT_LAWS = distribution(DRAFT, SAMPLING)


class TableReader:
    """Stands for a target's forward: the state after a token is it and the one before."""

    def __init__(self, target, layer_ids) -> None:
        self.target, self.text = target, []

    def __enter__(self):
        return self

    def __exit__(self, *error) -> None:
        pass

    def read_prompt(self, ids, chunk):
        self.text = list(ids)
        yield 0, Captured(None, torch.tensor([[0, 0], *itertools.pairwise(ids)]))

    def rows(self, start, tokens, captured) -> Rows:
        return Rows(start, torch.tensor(tokens), None, captured.last)

    def read_tree(self, tree: Tree) -> Captured:
        return Captured(None, states_of(self.text, tree))

    def keep(self, tree: Tree, path, token, captured) -> Rows:
        return kept(self.text, tree, path, token, captured)


class TableBatchReader:
    """The same for several texts."""

    def __init__(self, target, layer_ids, most) -> None:
        self.target, self.texts = target, []

    __enter__, __exit__ = TableReader.__enter__, TableReader.__exit__

    def join(self, alone: TableReader) -> None:
        self.texts.append(alone.text)

    def leave(self, text: int) -> None:
        self.texts[text] = self.texts[-1]
        self.texts.pop()

    def read_trees(self, trees) -> list[Captured]:
        return [Captured(None, states_of(*one)) for one in zip(self.texts, trees, strict=True)]

    def keep(self, *given) -> list[Rows]:
        return [kept(*one) for one in zip(self.texts, *given, strict=True)]


def states_of(text: list[int], tree: Tree) -> torch.Tensor:
    before = [text[-1] if parent < 0 else tree.tokens[parent] for parent in tree.parents]
    return torch.tensor(list(zip(before, tree.tokens, strict=True)))


def kept(text: list[int], tree: Tree, path, token, captured) -> Rows:
    start = len(text)
    text += [tree.tokens[node] for node in (0, *path)]
    return kept_rows(start, tree, path, token, captured, torch.device("cpu"))


def target():
    """The table as a target: only what the loop asks for."""
    logits = lambda last: LOGITS[last[..., 0], last[..., 1]]  # noqa: E731
    return SimpleNamespace(
        logits=logits,
        device=torch.device("cpu"),
        eos_ids=(),
        name="table",
        lm_head=None,
        config=SimpleNamespace(),
    )


class TableDrafter:
    """Draws siblings from a law that depends on the last token; or names no law for the best of it."""

    layer_ids: tuple[int, ...] = ()

    def __init__(self, widths: tuple[int, ...], drawn: bool) -> None:
        self.widths, self.drawn = widths, drawn

    def begin(self, chance) -> None:
        self.chance = chance

    def observe(self, rows: Rows) -> None:
        self.root = int(rows.tokens[-1])

    def propose(self) -> Tree:
        tokens, parents, q, frontier = [self.root], [-1], [], [0]
        for width in self.widths:
            grown = []
            for node in frontier:
                law = DRAFT_LAWS[tokens[node]]
                q.append(law)
                ranked = law.argsort(descending=True)[:width].tolist()
                for token in draw_without_replacement(law, width, self.chance) if self.drawn else ranked:
                    grown.append(len(tokens))
                    tokens.append(token)
                    parents.append(node)
            frontier = grown
        named = (*q, *[None] * (len(tokens) - len(q)))
        return Tree(tuple(tokens), tuple(parents), named if self.drawn else None)


RULES = {
    "chain of samples": (TableDrafter((1, 1), True), False),
    "block of samples": (TableDrafter((1, 1), True), True),
    "tree of samples": (TableDrafter((2, 1), True), False),
    "tree under the target's law alone": (TableDrafter((3, 2), False), False),
}


def alone(drafter, settings: Settings, samples: int) -> Counter:
    """Draw texts one after the other."""
    chance = SeededChance(11)
    made = (generate(target(), drafter, PROMPT, settings, chance=chance).ids for _ in range(samples))
    return Counter(map(tuple, made))


def together(drafter, settings: Settings, samples: int) -> Counter:
    """Draw texts in batches of 500, all from one source."""
    chance, table, found = SeededChance(12), target(), Counter()
    for start in range(0, samples, 5_000):
        these = range(start, min(start + 5_000, samples))
        jobs = [Job(PROMPT, copy.copy(drafter), chance) for _ in these]
        found.update(tuple(made.ids) for made in generate_together(table, jobs, settings, 500))
    return found


def chi_square(drafter, block: bool, samples: int, draw=alone) -> tuple[float, int]:
    """Return the statistic of `samples` texts against the exact law, and its degrees of freedom."""
    seen = draw(drafter, Settings(max_new_tokens=LENGTH, sampling=SAMPLING, eos_ids=(), block=block), samples)
    assert seen.total() == samples
    expected = {}
    for text in itertools.product(range(VOCAB), repeat=LENGTH):
        p, before = 1.0, tuple(PROMPT)
        for token in text:
            p, before = p * float(LAWS[before[-2], before[-1], token]), (*before, token)
        expected[text] = p * samples
    assert all(expected[text] > 0 for text in seen)
    often = [text for text in expected if expected[text] >= 5]
    pairs = [(seen.get(text, 0), expected[text]) for text in often]
    rest = samples - sum(wanted for _, wanted in pairs)
    if rest > 5:
        pairs.append((samples - sum(count for count, _ in pairs), rest))
    return sum((count - wanted) ** 2 / wanted for count, wanted in pairs), len(pairs) - 1


def limit(freedom: int) -> float:
    """The 99.9th percentile of chi-square (Wilson and Hilferty's formula)."""
    return freedom * (1 - 2 / (9 * freedom) + 3.0902 * (2 / (9 * freedom)) ** 0.5) ** 3


@pytest.fixture(autouse=True)
def _table(monkeypatch):
    for module in (loop, batch):
        monkeypatch.setattr(module, "TargetReader", TableReader)
    monkeypatch.setattr(batch, "BatchReader", TableBatchReader)


@pytest.mark.parametrize("draw", [alone, together])
@pytest.mark.parametrize("rule", RULES)
def test_1500_draws_agree_with_the_law(rule, draw):
    statistic, freedom = chi_square(*RULES[rule], 1_500, draw)
    assert freedom > 15
    assert statistic < limit(freedom)


@pytest.mark.slow
@pytest.mark.parametrize("rule", RULES)
def test_100000_draws_agree_with_the_law(rule):
    statistic, freedom = chi_square(*RULES[rule], 100_000, together)
    assert freedom > 15
    assert statistic < limit(freedom)


def test_a_drafter_that_names_a_wrong_law_is_seen():
    """The statistic can fail: the best guesses, named as samples of the law, are far from it."""

    class Lying(TableDrafter):
        def propose(self) -> Tree:
            tree = super().propose()
            q = [DRAFT_LAWS[token] for token in tree.tokens[:2]]
            return Tree(tree.tokens, tree.parents, (*q, None))

    for draw in (alone, together):
        statistic, freedom = chi_square(Lying((1, 1), False), False, 1_500, draw)
        assert statistic > 3 * limit(freedom)
