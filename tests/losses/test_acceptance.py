"""Acceptance from a table of hits equals a naive simulation of the decoding loop."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from eagle_train.losses.acceptance import AcceptanceCounts, chain_hits, greedy_chain
from tests.heads.small import TWO_DOCUMENTS, small_batch, small_frozen, small_head, softmax_attention


def _naive_loop(spans, is_right, gamma):
    """Decode every answer as a loop would: is_right(span, t, i) says whether guess i of a round at row t is.

    Tokens s..e of an answer; s comes from the prefill. A round emits its accepted guesses and one more
    token, as far as the answer goes.
    """
    rounds = tokens = 0
    histogram = [0] * (gamma + 1)
    for number, (s, e) in enumerate(spans):
        emitted = [s]
        while emitted[-1] < e:
            t = emitted[-1] - 1  # the row that reads the last emitted token
            accepted = 0
            for i in range(gamma):
                if t + 2 + i > e or not is_right(number, t, i):
                    break
                accepted += 1
            block = [token for token in range(t + 2, t + 2 + accepted + 1) if token <= e]
            rounds += 1
            tokens += len(block)
            histogram[accepted] += 1
            emitted += block
        assert emitted == list(range(s, e + 1)), "every token once, in order"
    return AcceptanceCounts(rounds, tokens, tuple(histogram))


@settings(max_examples=200)
@given(
    st.lists(st.tuples(st.integers(1, 3), st.integers(0, 12)), min_size=1, max_size=4),
    st.integers(1, 5),
    st.randoms(use_true_random=False),
    st.floats(0, 1),
)
def test_replay_equals_the_decoding_loop_on_any_table(shapes, gamma, random, share):
    spans, at = [], 0
    for gap, length in shapes:
        spans.append((at + gap, at + gap + length))
        at += gap + length + 1
    rows = [(number, t, e - t - 1) for number, (s, e) in enumerate(spans) for t in range(s - 1, e - 1)]
    table = {(number, t): [random.random() < share for _ in range(gamma)] for number, t, _ in rows}
    hits = torch.tensor([table[number, t] for number, t, _ in rows], dtype=torch.bool).reshape(-1, gamma).T
    batch = SimpleNamespace(room=torch.tensor([room for _, _, room in rows], dtype=torch.int64))
    counts = greedy_chain(hits, batch)
    assert counts == _naive_loop(spans, lambda number, t, i: table[number, t][i], gamma)
    assert counts.tokens == sum(e - s for s, e in spans)
    assert sum(counts.histogram) == counts.rounds
    assert 1.0 <= counts.tau <= gamma + 1


def _table(value, rooms, gamma=3):
    return torch.full((gamma, len(rooms)), value), SimpleNamespace(room=torch.tensor(rooms))


def test_never_and_always_right():
    rooms = [9, 8, 7, 6, 5, 4, 3, 2, 1]
    assert greedy_chain(*_table(False, rooms)) == AcceptanceCounts(9, 9, (9, 0, 0, 0))
    assert greedy_chain(*_table(False, rooms)).tau == 1.0
    # 4 + 4, then one guess is left to accept and nothing comes after it
    assert greedy_chain(*_table(True, rooms)) == AcceptanceCounts(3, 9, (0, 1, 0, 2))


def test_counts_pool_over_prompts_and_give_rates():
    total = AcceptanceCounts(4, 7, (1, 3)) + AcceptanceCounts(6, 16, (1, 2, 3))
    assert total == AcceptanceCounts(10, 23, (2, 5, 3))
    assert total.tau == 2.3
    assert total.accepted_by_position == pytest.approx((0.8, 0.3))
    assert total.accepted_given_previous == pytest.approx((0.8, 0.375))
    assert sum([total], AcceptanceCounts()) == total
    assert AcceptanceCounts().tau == 1.0


@pytest.mark.parametrize(
    ("kind", "settings"), [("eagle3", {}), ("eagle3", {"norm_output": True}), ("eagle1", {})]
)
def test_predicted_acceptance_equals_a_loop_that_drafts_with_its_own_guesses(kind, settings):
    """The prediction is teacher forced; the loop feeds back what it guessed. They agree to the round."""
    head, frozen = small_head(kind, **settings), small_frozen()
    batch = small_batch(kind, frozen, [(40, [(3, 30), (33, 39)]), (25, [(5, 24)])])
    gamma = 3
    # make the text one on which the head is often right: write its own teacher-forced guesses into it
    for _ in range(12):
        hits = chain_hits(head, frozen, batch, gamma)
        _write_guesses(head, frozen, batch)
    hits = chain_hits(head, frozen, batch, gamma)
    assert 0 < hits.sum() < hits.numel()
    spans = [(3, 30), (33, 39), (40 + 5, 40 + 24)]
    starts = [0, 0, 40]

    def is_right(number, t, i):
        return _guess(head, frozen, batch, starts[number], t, i) == int(batch.input_ids[t + 2 + i])

    assert greedy_chain(hits, batch) == _naive_loop(spans, is_right, gamma)


def _write_guesses(head, frozen, batch):
    """Overwrite every third answer token by the head's own first guess of it."""
    from eagle_train.heads.ttt import unroll

    with torch.no_grad():
        (step,) = unroll(head, frozen, batch, 1)
        guesses = head.target_ids(head.logits(step.out, frozen).argmax(-1))
    at = batch.rows + 2
    chosen = at % 3 != 0
    batch.input_ids[at[chosen]] = guesses[chosen]
    batch.next_ids[:-1] = batch.input_ids[1:]


@torch.no_grad()
def _guess(head, frozen, batch, start, t, i):
    """Guess number i of a round at packed row t, drafted with a cache from the loop's own guesses."""
    cache = {}

    def attend(layer, q, k, v):
        if layer in cache:
            k, v = torch.cat([cache[layer][0], k]), torch.cat([cache[layer][1], v])
        cache[layer] = (k, v)
        return softmax_attention(q, k, v, torch.arange(len(k)) <= torch.arange(len(k))[-len(q) :, None])

    length = t - start + 1
    hidden = head.start(batch.feature[start : t + 1])
    embeds = frozen.embed(batch.input_ids[start + 1 : t + 2])
    out = head(hidden, embeds, torch.arange(length), attend)[-1:]
    guess = head.target_ids(head.logits(out, frozen).argmax(-1))
    for step in range(1, i + 1):
        out = head(head.carry(out), frozen.embed(guess), torch.tensor([length - 1 + step]), attend)
        guess = head.target_ids(head.logits(out, frozen).argmax(-1))
    return int(guess)


def test_tokens_outside_the_draft_vocabulary_are_misses():
    head, frozen = small_head("eagle3"), small_frozen()
    batch = small_batch("eagle3", frozen, TWO_DOCUMENTS)
    outside = (~head.in_draft).nonzero().flatten()
    batch.input_ids[:] = outside[torch.arange(len(batch.input_ids)) % len(outside)]
    batch.next_ids[:-1] = batch.input_ids[1:]
    assert not chain_hits(head, frozen, batch, 3).any()
