"""Plausible mistakes, each planted in the shipped source, and each seen by the tests of losslessness."""

from __future__ import annotations

import inspect
import types
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from eagle_train.decoding import cache, drafters, law, loop, reader, sampling, trees, verify
from eagle_train.decoding.drafters import HeadDrafter
from eagle_train.decoding.loop import Settings, generate, plain
from eagle_train.decoding.sampling import Sampling
from eagle_train.decoding.shapes import Chain, Sampled, Shape
from eagle_train.decoding.trees import StaticShape, Tree
from eagle_train.heads.config import HeadConfig
from eagle_train.heads.disk import build_head
from eagle_train.targets.load import Target, load_target

from .toys import largest_error, law_of, sampled_chain, sampled_siblings, toy_laws

LOOPS = ("chain loop", "short loop", "sibling loop")
EXACT, WRONG = 1e-5, 1e-3  # the shipped code errs by less than the first, a mutant by more than the second
PROMPT = [5, 17, 250, 33, 8, 121, 64]


@dataclass(frozen=True)
class Mutant:
    """One line of a module changed; `seen_by` names the experiment that must notice."""

    name: str
    module: types.ModuleType
    old: str
    new: str
    seen_by: str


MUTANTS = [
    Mutant("q is kept after a sibling was refused", verify, "p), without(q, token)", "p), q", "siblings"),
    Mutant(
        "the residual is not normalised", verify, "scaled(_residual(p, q), p)", "_residual(p, q)", "siblings"
    ),
    Mutant("a refused child is not removed", verify, "without(p, token), None", "p, None", "any tree"),
    Mutant("p and q are swapped", verify, "p[token] / q[token]", "q[token] / p[token]", "chain"),
    Mutant("the residual has the wrong sign", verify, "share * p - q", "q - share * p", "chain"),
    Mutant(
        "only the refused token is taken off",
        verify,
        "scaled(_residual(p, q), p)",
        "without(p, token)",
        "chain",
    ),
    Mutant(
        "siblings are walked in the order of p",
        verify,
        "for child in tree.children[node]:",
        "for child in sorted(tree.children[node], key=lambda child: -p[tree.tokens[child]]):",
        "siblings",
    ),
    Mutant(
        "a block forgets its earlier shares", verify, "min(1.0, shares[i] * float", "min(1.0, float", "block"
    ),
    Mutant(
        "a block stops at its first chance", verify, "range(gamma - 1, 0, -1)", "range(1, gamma)", "block"
    ),
    Mutant(
        "a block stands by its share alone", verify, "rest / (rest + 1 - shares[i])", "shares[i]", "block"
    ),
    Mutant("a block's rest has no share", verify, "(p[kept], q, shares[kept])", "(p[kept], q)", "block"),
    Mutant(
        "the bonus token knows no temperature",
        law,
        "self._logits(node), self._sampling)",
        "self._logits(node), self._sampling if self._tree.children[node] else Sampling(1.0))",
        "short loop",
    ),
    Mutant(
        "siblings are drawn with replacement",
        drafters,
        "law = without(law, drawn[-1])",
        "law = law",
        "sibling loop",
    ),
    Mutant(
        "q is named without the temperature it was drawn at",
        drafters,
        "q.append(self._over_targets(law))",
        "q.append(self._over_targets(distribution(rows, Sampling(1.0))[len(drawn) % len(rows)]))",
        "chain loop",
    ),
    Mutant(
        "a chain stops by the value of the guess just made",
        drafters,
        "            nodes = grown\n",
        "            nodes = grown\n"
        "            if self.shape == Chain(2) and distribution(rows, self.sampling)[0, drawn[0]] < 0.6:\n"
        "                return Tree(tuple(tokens[:-1]), tuple(parents[:-1]), (*q[:-1], None))\n",
        "chain loop",
    ),
    Mutant(
        "cache rows are not compacted",
        reader,
        "keep(start, kept)",
        "keep(start, range(len(kept)))",
        "greedy loop",
    ),
    Mutant(
        "positions are off by one", reader, "positions = past + ", "positions = past + 1 + ", "greedy loop"
    ),
    Mutant(
        "the mask shows a cousin",
        trees,
        "sees[node] |= sees[parent]",
        "sees[node] |= sees[node - 1]",
        "greedy loop",
    ),
    Mutant(
        "the mask hides the parent",
        trees,
        "sees[node] |= sees[parent]",
        "sees[node] |= sees[0]",
        "greedy loop",
    ),
    Mutant("refused rows stay in view", cache, "self._show(start + len(kept))", "pass", "greedy loop"),
]


def planted(mutant: Mutant, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run the module's changed source and put its functions and methods in the place of the shipped ones."""
    source = inspect.getsource(mutant.module)
    assert source.count(mutant.old) == 1, f"{mutant.old!r} is not in the source once"
    changed = types.ModuleType(mutant.module.__name__)
    changed.__dict__["__file__"] = mutant.module.__file__
    exec(compile(source.replace(mutant.old, mutant.new), f"{mutant.name}", "exec"), changed.__dict__)
    for name, value in vars(changed).items():
        if isinstance(value, types.FunctionType) and value.__module__ == changed.__name__:
            for user in (mutant.module, loop, drafters, verify):
                if hasattr(user, name):
                    monkeypatch.setattr(user, name, value)
        if isinstance(value, type) and value.__module__ == changed.__name__:
            shipped = getattr(mutant.module, name)
            for attribute in ("sees", "keep", "read_tree", "_sampled", "__call__"):
                if attribute in vars(value) and attribute in vars(shipped):
                    monkeypatch.setattr(shipped, attribute, vars(value)[attribute])


class Scripted:
    """Guesses from a known text, right at the last rank, which makes the accepted rows lie apart."""

    layer_ids: tuple[int, ...] = ()
    shape = StaticShape.from_paths([(0,), (1,), (0, 0), (1, 0), (1, 1), (1, 1, 0)])

    def __init__(self, text: Sequence[int]) -> None:
        self.text = list(text)

    def begin(self, chance) -> None:
        self.read = 0

    def observe(self, rows) -> None:
        self.read += len(rows.last)
        self.root = int(rows.tokens[-1])

    def propose(self) -> Tree:
        """The path of ranks 1, 1, 0 is right in all rounds, the rest wrong."""
        tokens = [self.root]
        right = {2: 1, 5: 2, 6: 3}  # node -> depth
        for node, parent in enumerate(self.shape.parents[1:], start=1):
            wrong = (17 * node + 5 * parent + self.read) % 300
            at = self.read + right.get(node, 0)
            tokens.append(self.text[at] if node in right and at < len(self.text) else wrong)
        return Tree(tuple(tokens), self.shape.parents)


@pytest.fixture(scope="module")
def target(tiny_target_dir: Path) -> Target:
    return load_target(str(tiny_target_dir), dtype="fp32", device="cpu")


@pytest.fixture(scope="module")
def experiments(target: Target, toy: Target, law_error):
    """By name: a number that is near 0 where decoding is lossless."""
    p_laws, q_laws = toy_laws(1, "plain"), toy_laws(2, "plain")
    settings = Settings(max_new_tokens=24, eos_ids=())
    wanted = plain(target, PROMPT, settings).ids

    def greedy_loop() -> float:
        got = generate(target, Scripted([*PROMPT, *wanted]), PROMPT, settings)
        return sum(a != b for a, b in zip(got.ids, wanted, strict=True))

    def sampling_loop(*shapes: Shape, length: int) -> float:
        own, errors = Sampling(0.6, top_k=3), []
        for shape in shapes:
            torch.manual_seed(5)
            head = build_head(HeadConfig.for_target(toy.config.to_dict(), "eagle3", feature_layers=(0, 1)))
            with torch.no_grad():
                head.lm_head.weight.mul_(3)
            drafter = HeadDrafter(head, toy, shape, own)
            these = Settings(max_new_tokens=length, sampling=own, eos_ids=())
            texts = law_of(lambda chance: tuple(generate(toy, drafter, [1, 4, 2], these, chance=chance).ids))  # noqa: B023
            errors.append(law_error(texts, [1, 4, 2], length, own))
        return max(errors)

    any_tree = Tree((0, 3, 1, 2, 0, 2, 3), (-1, 0, 0, 1, 1, 2, 3))
    return {
        "chain": lambda: largest_error(sampled_chain(q_laws, 2), p_laws, verify.verify_sampled),
        "siblings": lambda: largest_error(sampled_siblings(q_laws, (3,)), p_laws, verify.verify_sampled),
        "any tree": lambda: largest_error(lambda chance: any_tree, p_laws, verify.verify_sampled),
        "block": lambda: largest_error(sampled_chain(q_laws, 3), p_laws, verify.verify_block),
        "greedy loop": greedy_loop,
        "chain loop": lambda: sampling_loop(Chain(2), length=2),
        "short loop": lambda: sampling_loop(Chain(1), length=3),
        "sibling loop": lambda: sampling_loop(Sampled((2,)), length=2),
    }


@pytest.mark.parametrize("name", ["chain", "siblings", "any tree", "block", "greedy loop", *LOOPS])
def test_the_shipped_code_passes(experiments, name):
    assert experiments[name]() < EXACT


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_a_mistake_is_seen(experiments, monkeypatch, mutant):
    planted(mutant, monkeypatch)
    error = experiments[mutant.seen_by]()
    assert error > WRONG


def test_children_that_were_not_drawn_as_named_are_seen():
    """Mistakes of a drafter under the p/q rule: best-ranked children, and pruning by a guess's own value."""
    p_laws, q_laws = toy_laws(1, "plain"), toy_laws(2, "plain")

    def best(chance) -> Tree:
        first, second, *_ = q_laws[()].argsort(descending=True).tolist()
        return Tree((0, first, second), (-1, 0, 0), (q_laws[()], None, None))

    def pruned_by_its_own_value(chance) -> Tree:
        tree = sampled_chain(q_laws, 1)(chance)
        return tree if q_laws[()][tree.tokens[1]] > 0.3 else Tree((0,), (-1,))

    def pruned_by_a_later_guess(chance) -> Tree:
        tree = sampled_chain(q_laws, 2)(chance)
        return tree if tree.tokens[2] != 1 else Tree(tree.tokens[:2], tree.parents[:2], (tree.q[0], None))

    def later_guess_prunes_all(chance) -> Tree:
        tree = sampled_chain(q_laws, 2)(chance)
        return tree if tree.tokens[2] != 1 else Tree((0,), (-1,))

    for draft in (best, pruned_by_its_own_value, pruned_by_a_later_guess, later_guess_prunes_all):
        assert largest_error(draft, p_laws, verify.verify_sampled) > WRONG, draft.__name__
    assert sampling.without(torch.tensor([0.5, 0.5]), 0).tolist() == [0, 1]
