"""The EAGLE-3 step: sums over counted rows, divided once, whatever the arrangement."""

from __future__ import annotations

import pytest
import torch

from eagle_train.heads.ttt import unroll
from eagle_train.shards.batches import counted_rows, idle, pack
from eagle_train.shards.frozen_target import FrozenTarget
from eagle_train.training.eagle3_step import Eagle3Step
from tests.heads.small import (
    TWO_DOCUMENTS,
    DenseMemory,
    small_batch,
    small_documents,
    small_frozen,
    small_head,
)

STEPS = 5


def _counts(shapes):
    return torch.tensor([counted_rows(spans, STEPS) for _, spans in shapes]).sum(0)


def _gradients(head):
    return {name: parameter.grad.clone() for name, parameter in head.named_parameters()}


def _naive(head, frozen, batch, counts):
    """Loss and per-step sums with every matrix written out: dense attention, whole logits."""
    sums, hits = [], []
    for step in unroll(head, frozen, batch, STEPS, memory=DenseMemory):
        label = batch.label0[step.index] + step.number
        log_q = head.logits(step.out, frozen).log_softmax(-1)
        p = frozen.logits(batch.label_last[label])[:, head.draft_ids].softmax(-1)
        known = head.in_draft[batch.label_argmax[label]]
        sums.append(-(p * log_q).sum(-1)[known].sum())
        hits.append((head.draft_ids[log_q.argmax(-1)] == batch.label_argmax[label]).sum())
    loss = sum(0.8**i * value / counts[i] for i, value in enumerate(sums))
    return loss, torch.stack(sums).detach(), torch.stack(hits)


@pytest.mark.parametrize("settings", [{}, {"fc_norm": True, "norm_output": True}, {"num_hidden_layers": 2}])
def test_step_equals_its_naive_twin(settings):
    frozen = small_frozen()
    batch, counts = small_batch("eagle3", frozen), _counts(TWO_DOCUMENTS)
    head, twin = small_head("eagle3", **settings), small_head("eagle3", **settings)
    result = Eagle3Step(head, frozen, num_steps=STEPS)(batch, counts)
    loss, sums, hits = _naive(twin, frozen, batch, counts)
    result.loss.backward()
    loss.backward()
    torch.testing.assert_close(result.loss, loss, rtol=1e-5, atol=0)
    torch.testing.assert_close(result.loss_sums, sums, rtol=1e-5, atol=0)
    assert result.hits.tolist() == hits.tolist()
    assert result.rows.tolist() == counts.tolist()
    assert 0 < (batch.label_argmax[batch.label0].unsqueeze(1) == head.draft_ids).any(1).float().mean() < 1
    wanted = _gradients(twin)
    for name, gradient in _gradients(head).items():
        scale = wanted[name].abs().max()
        assert scale > 0
        assert (gradient - wanted[name]).abs().max() < 2e-5 * scale, name


def test_packed_documents_equal_one_at_a_time():
    frozen, head = small_frozen(), small_head("eagle3")
    documents, counts = small_documents(frozen, TWO_DOCUMENTS), _counts(TWO_DOCUMENTS)
    step = Eagle3Step(head, frozen, num_steps=STEPS)
    together = step(pack(documents, "eagle3"), counts)
    together.loss.backward()
    wanted = _gradients(head)
    head.zero_grad()
    apart = [step(pack([document], "eagle3"), counts) for document in documents]
    for result in apart:
        result.loss.backward()
    torch.testing.assert_close(sum(r.loss_sums for r in apart), together.loss_sums, rtol=1e-6, atol=0)
    assert sum(r.hits for r in apart).tolist() == together.hits.tolist()
    for name, gradient in _gradients(head).items():
        assert (gradient - wanted[name]).abs().max() < 2e-6 * wanted[name].abs().max(), name


def test_prompts_and_what_nothing_reads_do_not_reach_the_loss():
    """NaN in features behind the last counted row changes nothing: rows are selected, never masked."""
    frozen, head = small_frozen(), small_head("eagle3")
    shapes = [(30, [(6, 16)])]
    counts = _counts(shapes)
    document = small_documents(frozen, shapes)[0]
    step = Eagle3Step(head, frozen, num_steps=STEPS)
    clean = step(pack([document], "eagle3"), counts)
    clean.loss.backward()
    wanted = _gradients(head)
    head.zero_grad()
    document.aux[15:] = float("nan")  # row 14 predicts token 16, the last one
    document.input_ids[17:] = 0
    result = step(pack([document], "eagle3"), counts)
    assert torch.equal(result.loss_sums, clean.loss_sums)
    result.loss.backward()
    for name, gradient in _gradients(head).items():
        assert torch.equal(gradient, wanted[name]), name


def test_each_label_is_made_once_over_the_draft_vocabulary_and_only_where_it_counts(monkeypatch):
    """All steps share it. One row of the output map a draft token; labels that cannot be drafted are none."""
    frozen, head = small_frozen(), small_head("eagle3")
    batch, counts = small_batch("eagle3", frozen), _counts(TWO_DOCUMENTS)
    made, logits = [], FrozenTarget.logits

    def spy(self, hidden):
        made.append((len(hidden), len(self.lm_head)))
        return logits(self, hidden)

    monkeypatch.setattr(FrozenTarget, "logits", spy)
    Eagle3Step(head, frozen, num_steps=STEPS)(batch, counts)
    used = {int(label) + i for i in range(STEPS) for label in batch.label0[batch.room > i]}
    used = {label for label in used if head.in_draft[batch.label_argmax[label]]}
    assert made == [(len(used), len(head.draft_ids))]


@pytest.mark.parametrize("shapes", [[(5, [(4, 4)])], [(6, [])]])
def test_a_batch_without_counted_rows_gives_a_zero_gradient_to_every_parameter(shapes):
    frozen, head = small_frozen(), small_head("eagle3")
    step = Eagle3Step(head, frozen, num_steps=STEPS)
    batch = small_batch("eagle3", frozen, shapes)
    for empty in (batch, idle(batch)):
        head.zero_grad()
        result = step(empty, torch.full((STEPS,), 7))
        result.loss.backward()
        assert result.loss == 0
        assert result.rows.tolist() == result.hits.tolist() == [0] * STEPS
        assert all(not gradient.any() for gradient in _gradients(head).values())


def test_short_answers_leave_late_steps_empty():
    frozen, head = small_frozen(), small_head("eagle3")
    shapes = [(9, [(3, 6)])]
    result = Eagle3Step(head, frozen, num_steps=STEPS)(small_batch("eagle3", frozen, shapes), _counts(shapes))
    assert result.rows.tolist() == [3, 2, 1, 0, 0]
    assert torch.isfinite(result.loss)
    assert result.loss_sums[3:].tolist() == [0, 0]


def test_only_the_head_is_trained_and_the_target_does_not_change():
    frozen, head = small_frozen(), small_head("eagle3")
    step = Eagle3Step(head, frozen, num_steps=STEPS)
    assert {id(p) for p in step.parameters()} == {id(p) for p in head.parameters()}
    before = frozen.embedding.clone(), frozen.lm_head.clone()
    step(small_batch("eagle3", frozen), _counts(TWO_DOCUMENTS)).loss.backward()
    assert torch.equal(frozen.embedding, before[0])
    assert torch.equal(frozen.lm_head, before[1])
    assert not frozen.embedding.requires_grad


@pytest.mark.parametrize("settings", [{}, {"fc_norm": True, "norm_output": True}])
def test_bfloat16_autocast_over_float32_weights_stays_near(settings):
    frozen, head = small_frozen(), small_head("eagle3", **settings)
    batch, counts = small_batch("eagle3", frozen), _counts(TWO_DOCUMENTS)
    step = Eagle3Step(head, frozen, num_steps=STEPS)
    exact = step(batch, counts)
    exact.loss.backward()
    wanted = _gradients(head)
    head.zero_grad()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        result = step(batch, counts)
    result.loss.backward()
    assert result.loss.dtype == torch.float32
    torch.testing.assert_close(result.loss, exact.loss, rtol=2e-2, atol=0)
    for name, gradient in _gradients(head).items():
        assert gradient.dtype == torch.float32
        cosine = torch.cosine_similarity(gradient.flatten(), wanted[name].flatten(), dim=0)
        assert cosine > 0.97, (name, cosine)


def test_steps_are_weighted_by_powers_of_the_decay():
    frozen, head = small_frozen(), small_head("eagle3")
    batch, counts = small_batch("eagle3", frozen), _counts(TWO_DOCUMENTS)
    for decay in (1.0, 0.5):
        result = Eagle3Step(head, frozen, num_steps=STEPS, step_decay=decay)(batch, counts)
        wanted = sum(decay**i * result.loss_sums[i] / counts[i] for i in range(STEPS))
        torch.testing.assert_close(result.loss.detach(), wanted, rtol=1e-6, atol=0)
