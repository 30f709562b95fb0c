"""The training-time test: equal to drafting step by step, equal to its dense twin, only counted rows."""

from __future__ import annotations

import pytest
import torch

from eagle_train.heads.ttt import unroll

from .small import TWO_DOCUMENTS, DenseMemory, small_batch, small_frozen, small_head, softmax_attention

HEADS = [
    ("eagle3", {}),
    ("eagle3", {"fc_norm": True, "norm_output": True}),
    ("eagle3", {"num_hidden_layers": 2, "qk_norm": True}),
    ("eagle3", {"draft_vocab_size": None, "attention_bias": True}),
    ("eagle1", {}),
    ("eagle1", {"num_hidden_layers": 2, "fc_bias": True}),
]
STEPS = 4


def _draft(head, frozen, feature, ids, t, num_steps):
    """Draft from row t of one document with a key-value cache, the teacher's tokens fed in. Returns outputs.

    Written as a decoding loop would: rows 0..t from true features first, then one row per step, each
    appended to the cache.
    """
    cache = {}

    def attend(layer, q, k, v):
        if layer in cache:
            k, v = torch.cat([cache[layer][0], k]), torch.cat([cache[layer][1], v])
        cache[layer] = (k, v)
        positions = torch.arange(len(k))
        return softmax_attention(q, k, v, positions <= positions[-len(q) :, None])

    hidden = head.start(feature[: t + 1])
    outs = [head(hidden, frozen.embed(ids[1 : t + 2]), torch.arange(t + 1), attend)[-1:]]
    for i in range(1, num_steps):
        row = head.carry(outs[-1])
        outs.append(head(row, frozen.embed(ids[t + 1 + i : t + 2 + i]), torch.tensor([t + i]), attend))
    return torch.cat(outs)


@pytest.mark.parametrize(("kind", "settings"), HEADS)
def test_unroll_equals_drafting_step_by_step_with_a_cache(kind, settings):
    head, frozen = small_head(kind, **settings), small_frozen()
    batch = small_batch(kind, frozen)
    found = {}
    for step in unroll(head, frozen, batch, STEPS):
        for out, c in zip(step.out, step.index.tolist(), strict=True):
            found[step.number, c] = out
    checked = 0
    for c, (row, room) in enumerate(zip(batch.rows.tolist(), batch.room.tolist(), strict=True)):
        start = max(x for x in batch.row_starts.tolist() if x <= row)
        steps = min(STEPS, room)
        drafted = _draft(head, frozen, batch.feature[start:], batch.input_ids[start:], row - start, steps)
        for i in range(steps):
            torch.testing.assert_close(found.pop((i, c)), drafted[i], atol=2e-5, rtol=1e-4)
            checked += 1
    assert not found, "nothing else is computed"
    assert checked > 4 * 15


@pytest.mark.parametrize(("kind", "settings"), HEADS)
def test_fast_path_equals_the_dense_twin_in_values_and_gradients(kind, settings):
    frozen = small_frozen()
    batch = small_batch(kind, frozen)
    results = []
    for memory in (None, DenseMemory):
        head = small_head(kind, **settings)
        outs = [step.out for step in unroll(head, frozen, batch, STEPS, memory=memory)]
        assert len(outs) == STEPS
        probe = torch.Generator().manual_seed(3)
        sum((out * torch.randn(out.shape, generator=probe)).sum() for out in outs).backward()
        results.append((outs, [p.grad for p in head.parameters()]))
    for fast, dense in zip(results[0][0], results[1][0], strict=True):
        torch.testing.assert_close(fast, dense, atol=1e-5, rtol=1e-5)
    for fast, dense in zip(results[0][1], results[1][1], strict=True):
        if dense is None:  # weights after the last output take part in the loss only
            assert fast is None
        else:
            torch.testing.assert_close(fast, dense, atol=1e-5 * dense.abs().max().item(), rtol=1e-4)


def test_each_step_computes_exactly_the_rows_that_count():
    head, frozen = small_head("eagle3"), small_frozen()
    batch = small_batch("eagle3", frozen)
    for step in unroll(head, frozen, batch, 12):
        starts = (0, TWO_DOCUMENTS[0][0])
        wanted = [
            start + t
            for start, (_, spans) in zip(starts, TWO_DOCUMENTS, strict=True)
            for s, e in spans
            for t in range(s - 1, e - 1 - step.number)
        ]
        assert batch.rows[step.index].tolist() == wanted
        assert step.out.shape == (len(wanted), 32)
    assert step.number == 9, "the longest answer has ten rows, so there is a tenth step and no eleventh"


@pytest.mark.parametrize(("kind", "layers"), [("eagle3", 1), ("eagle3", 2), ("eagle1", 1)])
def test_prompts_cost_keys_and_values_alone(kind, layers):
    """Rows through each product of the top layer; a document's rows behind its last counted one are none."""
    head, frozen = small_head(kind, num_hidden_layers=layers), small_frozen()
    batch = small_batch(kind, frozen, [(30, [(12, 20)]), (17, [(6, 16)])])
    top = [head.midlayer, *head.layers.children()][-1] if kind == "eagle3" else head.layers[-1]
    seen: dict[str, list[int]] = {}
    for name, module in top.named_modules():
        if isinstance(module, torch.nn.Linear):
            module.register_forward_hook(
                lambda _, given, __, name=name: seen.setdefault(name.split(".")[-1], []).append(len(given[0]))
            )
    counted = [len(step.index) for step in unroll(head, frozen, batch, 3)]
    assert counted == [8 + 10, 7 + 9, 6 + 8]
    read = [19 + 15, *counted[1:]]  # rows 0..18 and 0..14
    assert seen == {
        **dict.fromkeys(("k_proj", "v_proj"), read),
        **dict.fromkeys(("q_proj", "o_proj", "gate_proj", "up_proj", "down_proj"), counted),
    }


def test_a_row_needed_later_is_computed_though_it_does_not_count_now():
    head, frozen = small_head("eagle3"), small_frozen()
    batch = small_batch("eagle3", frozen)
    plain = list(unroll(head, frozen, batch, 3))
    counted = torch.zeros(3, len(batch.rows), dtype=torch.bool)
    counted[0, 1] = counted[2, 0] = counted[2, 9] = True
    steps = list(unroll(head, frozen, batch, 3, counted))
    assert [step.index.tolist() for step in steps] == [[0, 1, 9], [0, 9], [0, 9]]
    assert [step.counted.tolist() for step in steps] == [[1], [], [0, 1]]
    torch.testing.assert_close(steps[2].out[0], plain[2].out[plain[2].index == 0][0], atol=1e-5, rtol=1e-5)


def test_other_documents_and_what_follows_do_not_matter():
    head, frozen = small_head("eagle3"), small_frozen()
    batch = small_batch("eagle3", frozen)
    changed = small_batch("eagle3", frozen, seed=9)
    cut = TWO_DOCUMENTS[0][0]
    changed.feature[cut:] = batch.feature[cut:]
    changed.input_ids[cut:], changed.next_ids[cut:] = batch.input_ids[cut:], batch.next_ids[cut:]
    for step, other in zip(unroll(head, frozen, batch, 3), unroll(head, frozen, changed, 3), strict=True):
        second = batch.rows[step.index] >= cut
        assert second.any()
        torch.testing.assert_close(step.out[second], other.out[second], atol=0, rtol=0)
        assert not torch.equal(step.out[~second], other.out[~second])


def test_a_batch_without_rows_yields_no_step():
    frozen = small_frozen()
    batch = small_batch("eagle3", frozen, [(5, [(4, 4)]), (3, [])])
    assert list(unroll(small_head("eagle3"), frozen, batch, 3)) == []
