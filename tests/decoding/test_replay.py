"""Replays over tables equal the decoding loop: static trees, stopping chains, sampled chains in the mean."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from eagle_train.decoding.drafters import HeadDrafter
from eagle_train.decoding.loop import Settings, generate, plain
from eagle_train.decoding.reader import Rows
from eagle_train.decoding.sampling import Sampling, SeededChance
from eagle_train.decoding.shapes import Chain, Dynamic, Static
from eagle_train.decoding.trees import EAGLE1_PATHS
from eagle_train.evaluation.replay import replay_chain, replay_paths, tables
from eagle_train.evaluation.tree_replay import replay_tree, tree_tables
from eagle_train.evaluation.tuning import answered
from eagle_train.heads.config import HeadConfig
from eagle_train.heads.disk import build_head
from eagle_train.losses.acceptance import AcceptanceCounts, chain_hits, greedy_chain
from eagle_train.shards.batches import pack
from eagle_train.targets.load import Target, load_target

from .test_prediction import overfit, text_row, texts
from .toys import law_of

PATHS = ((0,), (1,), (2,), (0, 0), (0, 1), (1, 0), (0, 0, 0), (1, 0, 2))


@pytest.fixture(scope="module")
def target(tiny_target_dir: Path) -> Target:
    return load_target(str(tiny_target_dir), dtype="fp32", device="cpu")


@pytest.fixture(scope="module", params=["eagle1", "eagle3"])
def known(request, target):
    """Texts, and a head that half knows them."""
    torch.manual_seed(0)
    some = texts(target, 4, 24)
    config = HeadConfig.for_target(target.config.to_dict(), request.param)
    head = build_head(config)
    batch = pack([text_row(target, config.layers_for(8), *text) for text in some], request.param)
    overfit(head, target, batch, 12)
    return some, head.eval(), batch


def decoded(target: Target, head, shape, some) -> AcceptanceCounts:
    total, drafter = AcceptanceCounts(), HeadDrafter(head, target, shape)
    for prompt, answer in some:
        made = generate(target, drafter, prompt, Settings(max_new_tokens=len(answer), eos_ids=()))
        assert made.ids == answer
        total += made.counts
    return total


@pytest.mark.parametrize("paths", [PATHS, EAGLE1_PATHS, ((0,), (0, 0))], ids=["tree", "eagle1", "chain"])
def test_a_static_tree_replayed_equals_the_loop(target, known, paths):
    some, head, batch = known
    found = tables(head, target.frozen(), batch, 5, Sampling())
    counts, measured = (
        replay_paths(found.ranks, found.room, paths),
        decoded(target, head, Static(paths), some),
    )
    assert (counts.rounds, counts.tokens) == (measured.rounds, measured.tokens)
    assert counts == AcceptanceCounts(histogram=(0,) * len(counts.histogram)) + measured
    assert counts.tau > 1.1


@pytest.mark.parametrize(("top_k", "sizes"), [(3, [(4, 3), (9, 4), (2, 1), (21, 2)]), (8, [(25, 3)])])
def test_a_dynamic_tree_replayed_equals_the_loop(target, known, top_k, sizes):
    """Whatever its number of nodes and levels, from trees of more of both that were grown once."""
    some, head, batch = known
    budgets = [guesses for guesses, _ in sizes]
    found = tree_tables(HeadDrafter(head, target, Dynamic()), batch, top_k, 4, budgets)
    for guesses, depth in sizes:
        counts = replay_tree(found, guesses, depth)
        measured = decoded(target, head, Dynamic(guesses + 1, top_k, depth), some)
        assert counts == AcceptanceCounts(histogram=(0,) * len(counts.histogram)) + measured
        assert counts.tau > 1.1
        assert 0 <= found.steps[guesses, depth] <= depth - 1


@pytest.mark.parametrize("guesses", [2, 6, 12])
@torch.inference_mode()
def test_the_steps_of_a_dynamic_tree_are_those_it_takes(target, known, guesses):
    """In the mean over the rows whose next token is among the first guesses."""
    _, head, batch = known
    found = tree_tables(HeadDrafter(head, target, Dynamic()), batch, 4, 4, [guesses])
    drafter, taken, rows, read = HeadDrafter(head, target, Dynamic(guesses + 1, 4, 4)), [], 0, -1
    expand = drafter.expand
    drafter.expand = lambda *given: taken.append(1) or expand(*given)
    for row, place in zip(batch.rows.tolist(), batch.position[batch.rows].tolist(), strict=True):
        if read < row - place:
            drafter.begin(SeededChance(0))
            read = row - place
        feature, tokens = batch.feature[read : row + 1], batch.input_ids[read : row + 2]
        aux = feature if drafter.layer_ids else None
        drafter.observe(Rows(place - (row - read), tokens, aux, feature))
        read = row + 1
        best = head.logits(drafter.last_out, drafter.frozen).topk(4).indices
        if batch.input_ids[row + 2] in head.target_ids(best):
            rows += 1
            drafter.propose()
    assert rows > 10
    assert found.steps[guesses, 4] == pytest.approx(len(taken) / rows)


@pytest.mark.parametrize("stop", [0.0, 0.05, 0.3, 0.8])
def test_a_stopping_chain_replayed_equals_the_loop(target, known, stop):
    some, head, batch = known
    found = tables(head, target.frozen(), batch, 4, Sampling())
    expected, measured = replay_chain(found, 4, True, stop), decoded(target, head, Chain(4, stop), some)
    assert (expected.rounds, expected.tokens) == (measured.rounds, measured.tokens)
    assert sum(expected.made) == expected.rounds


def test_without_a_stop_the_replay_is_the_prediction(target, known):
    _, head, batch = known
    found = tables(head, target.frozen(), batch, 3, Sampling())
    counts = greedy_chain(chain_hits(head, target.frozen(), batch, 3), batch)
    expected = replay_chain(found, 3, True)
    assert (expected.rounds, expected.tokens) == (counts.rounds, counts.tokens)
    assert expected.made == (0, 0, 0, counts.rounds)


@pytest.mark.parametrize(("gamma", "stop"), [(1, 0.0), (2, 0.0), (2, 0.08), (2, 0.15), (2, 0.35)])
def test_a_sampled_chain_replayed_is_the_loops_expectation(toy, gamma, stop):
    """Over all texts and all draws: the mean of the replays is the mean number of rounds of the loop."""
    torch.manual_seed(5)
    sampling, length, prompt = Sampling(0.9, top_k=2), 4, [1, 4, 2]
    sizes = {"feature_layers": (0, 1), "draft_vocab_size": 4}
    head = build_head(
        HeadConfig.for_target(toy.config.to_dict(), "eagle3", **sizes), torch.tensor([0, 2, 3, 5])
    )
    settings = Settings(max_new_tokens=length, sampling=sampling, eos_ids=())
    drafter = HeadDrafter(head, toy, Chain(gamma, stop), sampling)

    def rounds(chance) -> tuple[tuple[int, ...], int]:
        made = generate(toy, drafter, prompt, settings, chance=chance)
        return tuple(made.ids), len(made.accepted)

    seen: dict[tuple[int, ...], list[float]] = {}
    for (text, number), probability in law_of(rounds).items():
        sums = seen.setdefault(text, [0.0, 0.0])
        sums[0] += probability
        sums[1] += probability * number
    assert len(seen) == 16
    for text, (probability, weighted) in seen.items():
        batch = pack([text_row(toy, (0, 1), prompt, list(text))], "eagle3")
        found = tables(head, toy.frozen(), batch, gamma, sampling)
        expected = replay_chain(found, gamma, False, stop)
        assert expected.tokens == length - 1
        assert expected.rounds == pytest.approx(weighted / probability, abs=1e-4)
        assert sum(rounds for _, rounds, _ in expected.began) == pytest.approx(expected.rounds)
        assert sum(emitted for *_, emitted in expected.began) == pytest.approx(expected.tokens)


def test_sampled_texts_under_the_targets_law_alone_accept_by_rank(toy):
    """Given the text that was written, which guesses stood is certain: every round of the loop agrees."""
    torch.manual_seed(5)
    sampling, prompt, paths = Sampling(0.9, top_k=3), [1, 4, 2], ((0,), (1,), (0, 0))
    head = build_head(HeadConfig.for_target(toy.config.to_dict(), "eagle3", feature_layers=(0, 1)))
    for seed in range(8):
        settings = Settings(max_new_tokens=20, sampling=sampling, eos_ids=(), seed=seed)
        made = generate(toy, HeadDrafter(head, toy, Static(paths), sampling), prompt, settings)
        batch = pack([text_row(toy, (0, 1), prompt, made.ids)], "eagle3")
        found = tables(head, toy.frozen(), batch, 2, sampling)
        counts = replay_paths(found.ranks, found.room, paths)
        assert (counts.rounds, counts.tokens) == (made.counts.rounds, made.counts.tokens)


def test_answers_are_the_targets_own_with_their_features(target):
    from eagle_train.evaluation.questions import Question, conversations

    questions = [Question("1", "", ("Why?",)), Question("2", "", ("How do I bake bread?",))]
    head = build_head(HeadConfig.for_target(target.config.to_dict(), "eagle3"))
    batch, text = answered(head, target, questions, Settings(max_new_tokens=9, eos_ids=()))
    prompts = [conversation.ask(0) for _, conversation in conversations(target.tokenizer, questions)]
    answers = [plain(target, prompt, Settings(max_new_tokens=9, eos_ids=())).ids for prompt in prompts]
    assert batch.input_ids.tolist() == [*prompts[0], *answers[0], *prompts[1], *answers[1]]
    assert text == [*prompts[1], *answers[1]]
    assert batch.rows.tolist()[0] == len(prompts[0]) - 1
    assert batch.room.tolist()[0] == 8
