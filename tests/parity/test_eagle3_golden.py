"""The EAGLE-3 training step equals the reference code's: hidden states, logits, losses, gradients."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from eagle_train.heads.ttt import unroll
from eagle_train.training.eagle3_step import Eagle3Step

from .golden import frozen_of, head_of, load, packed

STEPS = 7
CASES = ("", "pad.")


def _case(prefix: str, mask: str = "loss_mask"):
    """Return head, frozen target, batch with rows counted as stored, counted, and the stored tensors.

    mask "loss_mask": step i counts m[t+i]. mask "compare": every row whose token x[t+1+i] exists.
    """
    tensors, record = load("eagle3_ttt")
    frozen = frozen_of(tensors)
    lengths = tensors.get(f"{prefix}attention_mask", tensors["input.attention_mask"]).sum(1).tolist()
    stored = tensors.get(f"{prefix}loss_mask", tensors["input.loss_mask"])
    features = torch.cat([tensors[f"input.feature_{name}"] for name in ("low", "mid", "high")], -1)
    counted = []
    for row, length in enumerate(lengths):
        for_steps = []
        for i in range(STEPS):
            if mask == "compare":
                m = torch.arange(length) + 1 + i < length
            else:
                m = torch.cat([stored[row, i:length], torch.zeros(i, dtype=torch.int64)]) > 0
            for_steps.append(m)
        counted.append(torch.stack(for_steps))
    batch, counted = packed(
        [tensors["input.input_ids"][row, :length] for row, length in enumerate(lengths)],
        [features[row, :length] for row, length in enumerate(lengths)],
        [tensors["input.target_last_hidden"][row, :length] for row, length in enumerate(lengths)],
        frozen,
        torch.cat(counted, dim=1).long(),
    )
    head = head_of(tensors, record, kind="eagle3", feature_layers=(2, 4, 5))
    return head, frozen, batch, counted, tensors, lengths


def _flat(values: Tensor, lengths: list[int]) -> Tensor:
    """(B, S, ..) -> (N, ..), real tokens only."""
    return torch.cat([values[row, :length] for row, length in enumerate(lengths)])


@pytest.mark.parametrize("prefix", CASES)
def test_hidden_states_and_logits_equal_the_reference_at_every_step(prefix):
    head, frozen, batch, counted, tensors, lengths = _case(prefix, mask="compare")
    seen = 0
    for step in unroll(head, frozen, batch, STEPS, counted):
        rows = batch.rows[step.index[step.counted]]
        out = step.out[step.counted]
        hidden = tensors.get(f"{prefix}hidden", tensors["output.hidden"])[step.number]
        torch.testing.assert_close(out, _flat(hidden, lengths)[rows], atol=2e-4, rtol=0)
        if not prefix:
            logits = _flat(tensors["output.draft_logits"][step.number], lengths)[rows]
            torch.testing.assert_close(head.logits(out, frozen), logits, atol=1e-4, rtol=0)
        compared = _flat(tensors[f"{prefix}compare_mask"][step.number], lengths).nonzero().flatten()
        assert rows.tolist() == compared.tolist()
        seen += 1
    assert seen == STEPS


@pytest.mark.parametrize("prefix", CASES)
def test_losses_and_gradients_equal_the_reference(prefix):
    head, frozen, batch, counted, tensors, _ = _case(prefix)
    size = tensors["input.input_ids"].numel()  # the reference divides by B*S, padding included
    result = Eagle3Step(head, frozen, num_steps=STEPS)(batch, torch.full((STEPS,), size), counted)
    result.loss.backward()
    output = prefix or "output."
    torch.testing.assert_close(result.loss_sums, tensors[f"{output}loss_sum"], rtol=5e-6, atol=0)
    torch.testing.assert_close(result.loss.detach(), tensors[f"{output}total_loss"], rtol=5e-6, atol=0)
    torch.testing.assert_close(result.loss_sums / size, tensors[f"{output}loss_step"], rtol=5e-6, atol=0)
    wanted = {
        name.removeprefix(f"{prefix}grad."): x
        for name, x in tensors.items()
        if name.startswith(f"{prefix}grad.")
    }
    found = dict(head.named_parameters())
    if not prefix:
        assert set(wanted) == set(found), "every trainable weight is compared"
    for name, gradient in wanted.items():
        got = found[name].grad
        assert got.abs().max() > 0
        assert (got - gradient).abs().max() <= 5e-5 * gradient.abs().max(), name


def test_hits_equal_the_reference_accuracy():
    head, frozen, batch, counted, tensors, _ = _case("")
    result = Eagle3Step(head, frozen, num_steps=STEPS)(batch, torch.ones(STEPS), counted)
    assert result.rows.tolist() == [33, 33, 33, 32, 31, 29, 27]
    torch.testing.assert_close(result.hits / result.rows, tensors["output.accuracy"], atol=1e-6, rtol=0)


def test_target_distribution_equals_the_reference():
    head, frozen, batch, _, tensors, lengths = _case("")
    p = frozen.restrict(head.draft_ids).logits(batch.label_last).float().softmax(-1)
    rows = [t for row, length in enumerate(lengths) for t in range(24 * row, 24 * row + length - 1)]
    wanted = _flat(tensors["output.target_p_step0"], lengths)[rows]
    torch.testing.assert_close(p[[t + 1 for t in rows]], wanted, atol=1e-6, rtol=0)
