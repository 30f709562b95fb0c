"""Verification leaves the target's law alone: exact sums over every random draw, by the shipped rules."""

from __future__ import annotations

import itertools

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from eagle_train.decoding.sampling import Sampling, distribution
from eagle_train.decoding.trees import Tree
from eagle_train.decoding.verify import verify_greedy, verify_sampled

VOCAB, LENGTH = 4, 3  # tokens of the toy language, tokens whose joint law is compared


def toy_laws(seed: int, kind: str) -> dict[tuple[int, ...], Tensor]:
    """A law of the next token [VOCAB] for every text of up to LENGTH tokens."""
    generator = torch.Generator().manual_seed(seed)
    laws = {}
    for length in range(LENGTH + 1):
        for text in itertools.product(range(VOCAB), repeat=length):
            law = torch.rand(VOCAB, generator=generator, dtype=torch.float64) ** 2 + 1e-3
            if kind == "holes":
                law[torch.randperm(VOCAB, generator=generator)[:2]] = 0
            elif kind == "certain":
                law = torch.nn.functional.one_hot(law.argmax(), VOCAB).double()
            elif kind == "uniform":
                law = torch.ones(VOCAB, dtype=torch.float64)
            laws[text] = law / law.sum()
    return laws


def path_text(tree: Tree, node: int) -> tuple[int, ...]:
    text: tuple[int, ...] = ()
    while node > 0:
        text, node = (tree.tokens[node], *text), tree.parents[node]
    return text


def largest_error(law_of, draft, p_laws: dict[tuple[int, ...], Tensor]) -> float:
    """Largest difference between the emitted tokens' joint law and the target's, over texts of LENGTH tokens.

    Whatever one round leaves open is filled from the target itself, so that only the round can be wrong.
    """

    def run(chance) -> tuple[int, ...]:
        tree = draft(chance)
        path, last = verify_sampled(tree, lambda node: p_laws[path_text(tree, node)], chance)
        text = (*(tree.tokens[node] for node in path), last)
        while len(text) < LENGTH:
            text = (*text, chance.choose(p_laws[text]))
        return text[:LENGTH]

    law = law_of(run)
    assert sum(law.values()) == pytest.approx(1, abs=1e-9)
    errors = []
    for text in itertools.product(range(VOCAB), repeat=LENGTH):
        wanted = 1.0
        for i, token in enumerate(text):
            wanted *= float(p_laws[text[:i]][token])
        errors.append(abs(law.get(text, 0.0) - wanted))
    return max(errors)


def sampled_chain(q_laws, gamma: int):
    def draft(chance) -> Tree:
        tokens, q = [0], []
        for _ in range(gamma):
            q.append(q_laws[tuple(tokens[1:])])
            tokens.append(chance.choose(q[-1]))
        return Tree(tuple(tokens), tuple(range(-1, gamma)), (*q, None))

    return draft


def sampled_siblings(q_laws, widths: tuple[int, ...]):
    """Draw widths[d] children of every node at depth d from q, one after the other, without replacement."""

    def draft(chance) -> Tree:
        tokens, parents, q = [0], [-1], []
        frontier: list[tuple[int, tuple[int, ...]]] = [(0, ())]
        for width in widths:
            grown = []
            for node, text in frontier:
                law = q_laws[text]
                q += [None] * (node + 1 - len(q))
                q[node] = law
                for _ in range(min(width, int((law > 0).sum()))):
                    token = chance.choose(law)
                    tokens.append(token)
                    parents.append(node)
                    grown.append((len(tokens) - 1, (*text, token)))
                    law = law.clone()
                    law[token] = 0
                    law = law / law.sum() if law.sum() > 0 else law
            frontier = grown
        return Tree(tuple(tokens), tuple(parents), (*q, *[None] * (len(tokens) - len(q))))

    return draft


KINDS = ("plain", "holes", "certain", "uniform")


@pytest.mark.parametrize("p_kind", KINDS)
@pytest.mark.parametrize("q_kind", KINDS)
@pytest.mark.parametrize("gamma", [1, 2])
def test_a_chain_of_samples_keeps_the_target_law(law_of, p_kind, q_kind, gamma):
    p_laws, q_laws = toy_laws(1, p_kind), toy_laws(2, q_kind)
    assert largest_error(law_of, sampled_chain(q_laws, gamma), p_laws) < 1e-9


def test_a_chain_drawn_from_the_target_itself_is_always_accepted(law_of):
    laws = toy_laws(1, "plain")
    draft = sampled_chain(laws, 2)

    def accepted(chance) -> int:
        tree = draft(chance)
        return len(verify_sampled(tree, lambda node: laws[path_text(tree, node)], chance)[0])

    assert law_of(accepted)[2] == pytest.approx(1, abs=1e-9)


@pytest.mark.parametrize("p_kind", KINDS)
@pytest.mark.parametrize("q_kind", KINDS)
@pytest.mark.parametrize("widths", [(3,), (2, 1)])
def test_a_tree_of_samples_without_replacement_keeps_the_target_law(law_of, p_kind, q_kind, widths):
    p_laws, q_laws = toy_laws(3, p_kind), toy_laws(4, q_kind)
    assert largest_error(law_of, sampled_siblings(q_laws, widths), p_laws) < 1e-9


@pytest.mark.parametrize("p_kind", KINDS)
@pytest.mark.parametrize(
    ("tokens", "parents"),
    [
        ((0, 2), (-1, 0)),
        ((0, 1, 2, 3, 0), (-1, 0, 0, 0, 0)),  # every token is a child: nothing is left for the last draw
        ((0, 3, 1, 2, 0, 2, 3, 3, 1), (-1, 0, 0, 1, 1, 2, 3, 3, 4)),
        ((0, 1, 1, 2), (-1, 0, 0, 1)),  # a drafter that repeats itself
        ((0,), (-1,)),
    ],
)
def test_a_tree_of_any_tokens_keeps_the_target_law(law_of, p_kind, tokens, parents):
    assert largest_error(law_of, lambda chance: Tree(tokens, parents), toy_laws(5, p_kind)) < 1e-9


def test_a_tree_chosen_at_random_keeps_the_target_law_without_naming_q(law_of):
    def draft(chance) -> Tree:
        first = chance.choose(torch.tensor([0.1, 0.2, 0.3, 0.4], dtype=torch.float64))
        return Tree((0, first, (first + 1) % VOCAB, first), (-1, 0, 0, 1))

    assert largest_error(law_of, draft, toy_laws(6, "plain")) < 1e-9


def test_naming_q_for_children_that_were_not_drawn_from_it_would_be_lossy(law_of):
    """The enumeration can fail: best-ranked children under the rule for samples change the law."""
    p_laws, q_laws = toy_laws(1, "plain"), toy_laws(2, "plain")
    best = int(q_laws[()].argmax())
    wrong = Tree((0, best), (-1, 0), (q_laws[()], None))
    assert largest_error(law_of, lambda chance: wrong, p_laws) > 1e-2


@pytest.mark.parametrize("sampling", [Sampling(0.7), Sampling(1.0, top_k=2), Sampling(1.5, top_p=0.6)])
def test_the_law_kept_is_the_one_after_temperature_top_k_and_top_p(law_of, sampling):
    logits = {text: law.log() * 1.3 for text, law in toy_laws(7, "plain").items()}
    warped = {text: distribution(row, sampling) for text, row in logits.items()}
    assert largest_error(law_of, sampled_chain(toy_laws(8, "plain"), 2), warped) < 1e-9


def test_sampled_verification_of_a_certain_law_is_greedy_verification(law_of):
    laws = toy_laws(9, "certain")
    tree = Tree((0, 3, 1, 2, 0, 2, 3, 3, 1), (-1, 0, 0, 1, 1, 2, 3, 3, 4))
    (outcome,) = law_of(
        lambda chance: str(verify_sampled(tree, lambda node: laws[path_text(tree, node)], chance))
    )
    assert outcome == str(verify_greedy(tree, lambda node: int(laws[path_text(tree, node)].argmax())))


def test_golden_law_of_where_acceptance_ends(law_of, golden_folder):
    golden = load_file(golden_folder / "posterior.safetensors")
    tree = Tree(tuple(golden["tree.tokens"].tolist()), tuple(golden["tree.parents"].tolist()))
    p = golden["sampling.node_logits"].double().softmax(-1)

    def run(chance) -> tuple[int, int]:
        path, last = verify_sampled(tree, lambda node: p[node], chance)
        return (path[-1] if path else 0), last

    joint = torch.zeros(len(tree), p.shape[1], dtype=torch.float64)  # [end node, last token]
    for (node, last), probability in law_of(run).items():
        joint[node, last] = probability
    ends = joint.sum(1)
    torch.testing.assert_close(ends.float(), golden["sampling.end_probability"], atol=1e-6, rtol=0)
    bonus = (joint / ends[:, None]).float()
    torch.testing.assert_close(bonus, golden["sampling.bonus_distribution"], atol=1e-6, rtol=0)
    mean = float((ends * torch.tensor(tree.depths)).sum())
    assert mean == pytest.approx(float(golden["sampling.expected_accept_length"]), abs=1e-6)
