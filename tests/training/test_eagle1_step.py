"""The EAGLE-1 step: regression and cross-entropy over counted rows, noise in training only."""

from __future__ import annotations

import pytest
import torch

from eagle_train.heads.ttt import unroll
from eagle_train.shards.batches import counted_rows
from eagle_train.training.eagle1_step import Eagle1Step, noisy
from tests.heads.small import TWO_DOCUMENTS, DenseMemory, small_batch, small_frozen, small_head

COUNT = torch.tensor([sum(counted_rows(spans, 1)[0] for _, spans in TWO_DOCUMENTS)])


@pytest.mark.parametrize("output_map", [{}, {"logit_scale": 0.5, "softcap": 2.0}])
def test_step_equals_its_naive_twin(output_map):
    frozen = small_frozen(**output_map)
    batch = small_batch("eagle1", frozen)
    head, twin = small_head("eagle1"), small_head("eagle1")
    result = Eagle1Step(head, frozen)(batch, COUNT)
    (step,) = unroll(twin, frozen, batch, 1, memory=DenseMemory)
    last = batch.label_last[batch.label0]  # the state having read x[t+1]
    p = frozen.logits(last).softmax(-1)
    cross = -(p * frozen.logits(step.out).log_softmax(-1)).sum(-1)
    regression = torch.nn.functional.smooth_l1_loss(step.out, last, reduction="none").mean(-1)
    loss = (regression.sum() + 0.1 * cross.sum()) / COUNT[0]
    loss.backward()
    result.loss.backward()
    torch.testing.assert_close(result.loss, loss, rtol=1e-5, atol=0)
    torch.testing.assert_close(result.loss_sums[0] / COUNT[0], loss.detach(), rtol=1e-5, atol=0)
    assert result.rows.tolist() == COUNT.tolist()
    hits = frozen.logits(step.out).argmax(-1) == batch.label_argmax[batch.label0]
    assert result.hits.tolist() == [int(hits.sum())]
    for (name, a), (_, b) in zip(head.named_parameters(), twin.named_parameters(), strict=True):
        assert (a.grad - b.grad).abs().max() < 2e-5 * b.grad.abs().max(), name


def test_more_steps_learn_from_the_heads_own_predictions_as_drafting_gives_them():
    """HASS: step i's loss at row t is of f[t+1+i], predicted from step i-1's own prediction at t."""
    num, decay = 3, 0.5
    counts = torch.tensor([counted_rows(spans, num) for _, spans in TWO_DOCUMENTS]).sum(0)
    frozen = small_frozen()
    batch = small_batch("eagle1", frozen)
    head, twin = small_head("eagle1"), small_head("eagle1")
    options = {"num_steps": num, "step_decay": decay, "top_k": (3, 2.0)}
    result = Eagle1Step(head, frozen, **options)(batch, counts)
    loss = 0.0
    for step in unroll(twin, frozen, batch, num, memory=DenseMemory):
        last = batch.label_last[batch.label0[step.index] + step.number]
        p, log_q = frozen.logits(last).softmax(-1), frozen.logits(step.out).log_softmax(-1)
        top = p.topk(3, dim=-1).indices
        cross = -(p * log_q).sum(-1) - 2.0 * (p.gather(-1, top) * log_q.gather(-1, top)).sum(-1)
        regression = torch.nn.functional.smooth_l1_loss(step.out, last, reduction="none").mean(-1)
        loss = loss + decay**step.number * (regression + 0.1 * cross).sum() / counts[step.number]
    loss.backward()
    result.loss.backward()
    torch.testing.assert_close(result.loss, loss, rtol=1e-5, atol=0)
    assert result.rows.tolist() == counts.tolist()
    for (name, a), (_, b) in zip(head.named_parameters(), twin.named_parameters(), strict=True):
        assert (a.grad - b.grad).abs().max() < 2e-5 * b.grad.abs().max(), name


def test_noise_amplitude_falls_with_each_documents_length():
    feature = torch.zeros(40, 8)
    uniform = torch.ones(40, 8)
    added = noisy(feature, uniform, torch.tensor([0, 8, 40]), 0.1)
    torch.testing.assert_close(added[:8], torch.full((8, 8), 0.1 * 512 / 8))
    torch.testing.assert_close(added[8:], torch.full((32, 8), 0.1 * 512 / 32))


def test_a_batch_without_counted_rows_gives_a_zero_gradient_to_every_parameter():
    frozen, head = small_frozen(), small_head("eagle1")
    result = Eagle1Step(head, frozen)(small_batch("eagle1", frozen, [(5, [(4, 4)])]), COUNT)
    result.loss.backward()
    assert result.loss == 0
    assert all(not p.grad.any() for p in head.parameters())


def test_bfloat16_autocast_over_float32_weights_stays_near():
    frozen, head = small_frozen(), small_head("eagle1")
    batch, step = small_batch("eagle1", frozen), Eagle1Step(head, frozen)
    exact = step(batch, COUNT).loss
    with torch.autocast("cpu", dtype=torch.bfloat16):
        result = step(batch, COUNT)
    result.loss.backward()
    torch.testing.assert_close(result.loss, exact, rtol=2e-2, atol=0)
    assert all(p.grad.dtype == torch.float32 for p in head.parameters())
