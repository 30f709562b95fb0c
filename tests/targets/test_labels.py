"""Labels: argmax and log-sum-exp over the whole vocabulary, in pieces, equal to the plain ones."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from eagle_train.targets import labels as room
from eagle_train.targets.labels import labels, reduce_logits
from eagle_train.targets.load import load_target


@pytest.mark.parametrize("vocab", [64, 300, 4096, 49_152])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_reduction_equals_the_plain_one(vocab: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(vocab)
    logits = (10 * torch.randn(23, vocab, generator=generator)).to(dtype)
    argmax, lse = reduce_logits(logits)
    torch.testing.assert_close(lse, logits.double().logsumexp(-1).float(), rtol=1e-6, atol=1e-6)
    assert torch.equal(argmax, logits.float().argmax(-1))
    assert lse.dtype == torch.float32


@pytest.mark.parametrize("vocab", [300, 4096])
def test_ties_take_the_lowest_id(vocab: int) -> None:
    logits = torch.zeros(3, vocab)
    logits[0, [70, 5, 200]] = 1.0
    logits[1, [130, 131]] = 2.0
    assert reduce_logits(logits)[0].tolist() == [5, 130, 0]


def test_large_logits_neither_overflow_nor_lose_their_sum() -> None:
    logits = torch.full((1, 4096), -1e4)
    logits[0, 7] = 3e4
    argmax, lse = reduce_logits(logits)
    assert argmax.item() == 7
    assert lse.item() == 3e4


def test_no_rows_give_no_labels() -> None:
    argmax, lse = reduce_logits(torch.empty(0, 300))
    assert len(argmax) == len(lse) == 0
    assert argmax.dtype == torch.int64


def test_pieces_of_rows_equal_all_rows_at_once(
    tiny_target_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = load_target(tiny_target_dir, device="cpu")
    last = torch.randn(70, 32, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        want = reduce_logits(target.logits(last))
        monkeypatch.setattr(room, "_MOST_LOGITS", {"cpu": 300 * 16})
        shapes = []
        own = target.lm_head.forward
        monkeypatch.setattr(target.lm_head, "forward", lambda x: shapes.append(len(x)) or own(x))
        got = labels(target, last)
    assert max(shapes) == 16
    assert torch.equal(got[0], want[0])
    torch.testing.assert_close(got[1], want[1])
