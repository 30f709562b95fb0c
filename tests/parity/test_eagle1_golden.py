"""The EAGLE-1 training step equals the reference code's: predicted features, losses, gradients, noise."""

from __future__ import annotations

import torch

from eagle_train.heads.ttt import unroll
from eagle_train.training.eagle1_step import Eagle1Step, noisy

from .golden import frozen_of, head_of, load, packed


def _case(every_row: bool = False):
    tensors, record = load("eagle1_step")
    frozen = frozen_of(tensors)
    ids = [tensors[f"raw{row}.input_ids"] for row in (0, 1)]
    last = [tensors[f"raw{row}.hidden_state"] for row in (0, 1)]
    masks = [tensors[f"raw{row}.loss_mask"].clone() for row in (0, 1)]
    for mask in masks:
        if every_row:
            mask[:] = 1
        mask[-1] = 0
    batch, counted = packed(ids, last, last, frozen, torch.cat(masks)[None])
    head = head_of(tensors, record, kind="eagle1", fc_bias=True)
    return head, frozen, batch, counted, tensors


def test_features_and_logits_equal_the_reference():
    head, frozen, batch, counted, tensors = _case(every_row=True)
    (step,) = unroll(head, frozen, batch, 1, counted)
    real = tensors["batch.attention_mask"].bool()
    predict, logits = tensors["output.predict"][real], tensors["output.logits"][real]
    torch.testing.assert_close(step.out, predict[batch.rows], atol=5e-5, rtol=0)
    torch.testing.assert_close(head.logits(step.out, frozen), logits[batch.rows], atol=5e-5, rtol=0)


def test_shifts_equal_the_reference_loader():
    _, _, batch, _, tensors = _case()
    real = tensors["batch.attention_mask"].bool()
    inside = torch.cat([torch.arange(21), torch.arange(22, 38)])  # but each document's last row
    assert torch.equal(batch.next_ids[inside], tensors["batch.input_ids"][real][inside])
    assert torch.equal(batch.label_last[batch.label0], tensors["batch.target"][real][batch.rows])
    assert torch.equal(batch.rows, tensors["batch.loss_mask"][real].nonzero().flatten())


def test_losses_and_gradients_equal_the_reference():
    head, frozen, batch, counted, tensors = _case()
    count = batch.rows.numel()
    total = torch.tensor([count + 1e-5], dtype=torch.float64)  # the reference adds 1e-5
    step = Eagle1Step(head, frozen)
    result = step(batch, total, counted)
    result.loss.backward()
    torch.testing.assert_close(result.loss.detach(), tensors["output.loss"], rtol=5e-6, atol=0)
    torch.testing.assert_close(result.loss_sums[0] / count, tensors["output.loss"], rtol=5e-6, atol=0)
    for weights, name in (((1.0, 0.0), "output.vloss"), ((0.0, 1.0), "output.ploss")):
        alone = Eagle1Step(head, frozen, feature_weight=weights[0], token_weight=weights[1])
        torch.testing.assert_close(
            alone(batch, total, counted).loss.detach(), tensors[name], rtol=5e-6, atol=0
        )
    for name, parameter in head.named_parameters():
        wanted = tensors[f"grad.{name}"]
        assert wanted.abs().max() > 0
        assert (parameter.grad - wanted).abs().max() <= 5e-5 * wanted.abs().max(), name


def test_noise_equals_the_reference_formula():
    tensors, record = load("eagle1_step")
    feature = tensors["noise.input"][0]
    noised = noisy(
        feature, tensors["noise.uniform"][0], torch.tensor([0, len(feature)]), record["noise_std"] / 2
    )
    torch.testing.assert_close(noised, tensors["noise.output"][0], atol=1e-6, rtol=0)
