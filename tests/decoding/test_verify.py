"""Verification leaves the target's law alone: exact sums over every random draw, by the shipped rules."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from safetensors.torch import load_file

from eagle_train.decoding.sampling import Sampling, distribution
from eagle_train.decoding.trees import Tree
from eagle_train.decoding.verify import verify_block, verify_greedy, verify_sampled

from .toys import KINDS, VOCAB, largest_error, law_of, opposite, sampled_chain, sampled_siblings, toy_laws


@pytest.fixture(params=KINDS)
def p_laws(request):
    return toy_laws(1, request.param)


@pytest.fixture(params=["friend", "foe", *KINDS])
def q_laws(request, p_laws):
    """What guesses are drawn from: the target's own law, its opposite, and laws that know nothing of it."""
    own = {"friend": lambda: p_laws, "foe": lambda: opposite(p_laws)}
    return own[request.param]() if request.param in own else toy_laws(2, request.param)


@pytest.mark.parametrize("gamma", [1, 3])
@pytest.mark.parametrize("rule", [verify_sampled, verify_block])
def test_a_chain_of_samples_keeps_the_target_law(p_laws, q_laws, gamma, rule):
    assert largest_error(sampled_chain(q_laws, gamma), p_laws, rule) < 1e-9


@pytest.mark.parametrize("rule", [verify_sampled, verify_block])
def test_a_chain_drawn_from_the_target_itself_is_always_accepted(rule):
    assert kept(sampled_chain(toy_laws(1, "plain"), 3), toy_laws(1, "plain"), rule) == pytest.approx(3)


def kept(draft, p_laws, rule) -> float:
    """The expected number of guesses kept."""

    def accepted(chance) -> int:
        tree = draft(chance)
        return len(rule(tree, lambda node: p_laws[tree.words(node)], chance)[0])

    return sum(number * probability for number, probability in law_of(accepted).items())


@pytest.mark.parametrize("seed", range(4))
def test_a_block_keeps_more_guesses_than_one_decision_per_guess(seed):
    p_laws, draft = toy_laws(seed, "plain"), sampled_chain(toy_laws(seed + 50, "plain"), 3)
    one_by_one, together = (kept(draft, p_laws, rule) for rule in (verify_sampled, verify_block))
    assert together > one_by_one + 1e-3


@pytest.mark.parametrize("widths", [(4,), (2, 1)])
def test_a_tree_of_samples_without_replacement_keeps_the_target_law(p_laws, q_laws, widths):
    assert largest_error(sampled_siblings(q_laws, widths), p_laws) < 1e-9


@pytest.mark.parametrize("p_kind", ["plain", "holes"])
@pytest.mark.parametrize("q_kind", ["foe", "plain", "holes", "certain"])
def test_a_tree_of_samples_of_depth_3_keeps_the_target_law(p_kind, q_kind):
    p_laws = toy_laws(3, p_kind, vocab=3)
    q_laws = opposite(p_laws) if q_kind == "foe" else toy_laws(4, q_kind, vocab=3)
    assert largest_error(sampled_siblings(q_laws, (2, 1, 1)), p_laws) < 1e-9


def test_siblings_that_were_sampled_stand_more_often_than_by_the_targets_law_alone():
    p_laws, draft = toy_laws(1, "plain"), sampled_siblings(toy_laws(2, "plain"), (2, 1))
    by_ratio = kept(draft, p_laws, verify_sampled)

    def nameless(chance) -> Tree:
        return dataclasses.replace(draft(chance), q=None)

    assert by_ratio > kept(nameless, p_laws, verify_sampled) + 1e-2


@pytest.mark.parametrize(
    ("tokens", "parents"),
    [
        ((0, 2), (-1, 0)),
        ((0, 1, 2, 3, 0), (-1, 0, 0, 0, 0)),  # every token is a child: nothing is left for the last draw
        ((0, 3, 1, 2, 0, 2, 3, 3, 1), (-1, 0, 0, 1, 1, 2, 3, 3, 4)),
        ((0, 1, 1, 2), (-1, 0, 0, 1)),  # a drafter that repeats itself
        ((0, 1, 2, 3), (-1, 0, 1, 2)),
        ((0,), (-1,)),
    ],
)
def test_a_tree_of_any_tokens_keeps_the_target_law(p_laws, tokens, parents):
    assert largest_error(lambda chance: Tree(tokens, parents), p_laws) < 1e-9


def test_a_tree_chosen_at_random_keeps_the_target_law_without_naming_q():
    def draft(chance) -> Tree:
        first = chance.choose(torch.tensor([0.1, 0.2, 0.3, 0.4], dtype=torch.float64))
        return Tree((0, first, (first + 1) % VOCAB, first), (-1, 0, 0, 1))

    assert largest_error(draft, toy_laws(6, "plain")) < 1e-9


def test_naming_q_for_children_that_were_not_drawn_from_it_would_be_lossy():
    """The enumeration can fail: best-ranked children under the rule for samples change the law."""
    p_laws, q_laws = toy_laws(1, "plain"), toy_laws(2, "plain")
    best = int(q_laws[()].argmax())
    wrong = Tree((0, best), (-1, 0), (q_laws[()], None))
    assert largest_error(lambda chance: wrong, p_laws) > 1e-2


@pytest.mark.parametrize("sampling", [Sampling(0.7), Sampling(1.0, top_k=2), Sampling(1.5, top_p=0.6)])
def test_the_law_kept_is_the_one_after_temperature_top_k_and_top_p(sampling):
    logits = {text: law.log() * 1.3 for text, law in toy_laws(7, "plain").items()}
    warped = {text: distribution(row, sampling) for text, row in logits.items()}
    assert largest_error(sampled_chain(toy_laws(8, "plain"), 2), warped) < 1e-9


def test_sampled_verification_of_a_certain_law_is_greedy_verification():
    laws = toy_laws(9, "certain")
    tree = Tree((0, 3, 1, 2, 0, 2, 3, 3, 1), (-1, 0, 0, 1, 1, 2, 3, 3, 4))
    (outcome,) = law_of(lambda chance: str(verify_sampled(tree, lambda node: laws[tree.words(node)], chance)))
    assert outcome == str(verify_greedy(tree, lambda node: int(laws[tree.words(node)].argmax())))


def test_golden_law_of_where_acceptance_ends(golden_folder):
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
