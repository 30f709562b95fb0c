"""The Medusa step against its definition, and a run from shards of any kind."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from eagle_train.heads.disk import load_head
from eagle_train.recipe_files import load_recipe
from eagle_train.shards.reader import open_shards
from eagle_train.targets.extract import extract
from eagle_train.training import dry_run, source
from eagle_train.training.loop import train
from eagle_train.training.medusa_step import MedusaStep
from eagle_train.training.metrics import read_metrics
from tests.heads.small import TWO_DOCUMENTS, D, small_batch, small_documents, small_frozen, small_head


def written_out(head, frozen, documents, decay: float):
    """Head i on row t of an answer [s, e] guesses x[t+2+i] from f[t]; t runs from s-1 while t+2+i <= e."""
    losses, counts, hits = [], [], []
    for i in range(head.config.medusa_heads):
        loss, count, hit = torch.zeros(()), 0, 0
        for document in documents:
            for s, e in document.spans:
                for t in range(s - 1, e - 1 - i):
                    f = document.last_all[t]
                    out = f + torch.nn.functional.silu(head.blocks[i].weight @ f + head.blocks[i].bias)
                    logits = head.lm_heads[i].weight @ out  # [D]
                    target = frozen.logits(document.last_all[t + 1 + i])  # [V], of x[t+2+i]
                    count += 1
                    if not head.in_draft[target.argmax()]:
                        continue
                    p = target[head.draft_ids].softmax(0)
                    loss = loss - (p * logits.log_softmax(0)).sum()
                    hit += int(head.draft_ids[logits.argmax()] == target.argmax())
        losses.append(loss)
        counts.append(count)
        hits.append(hit)
    total = sum(decay**i * loss / count for i, (loss, count) in enumerate(zip(losses, counts, strict=True)))
    return total, losses, counts, hits


def test_loss_and_gradients_equal_the_definition():
    frozen = small_frozen()
    head = small_head("medusa", medusa_heads=3, draft_vocab_size=D)
    documents = small_documents(frozen, TWO_DOCUMENTS)
    wanted, losses, counts, hits = written_out(head, frozen, documents, 0.8)
    wanted.backward()
    gradients = [parameter.grad.clone() for parameter in head.parameters()]
    head.zero_grad()
    got = MedusaStep(head, frozen)(small_batch("medusa", frozen), torch.tensor(counts, dtype=torch.float32))
    got.loss.backward()
    torch.testing.assert_close(got.loss, wanted)
    torch.testing.assert_close(got.loss_sums, torch.stack(losses).detach())
    assert got.rows.tolist() == counts
    assert got.hits.tolist() == hits
    for parameter, gradient in zip(head.parameters(), gradients, strict=True):
        torch.testing.assert_close(parameter.grad, gradient, atol=1e-6, rtol=1e-4)


@pytest.mark.parametrize("place", ["first", "last"])
def test_first_and_last_supervised_rows_read_the_state_before_the_guess(place):
    frozen = small_frozen()
    head = small_head("medusa", medusa_heads=1)
    spans = [(12, [(5, 9)])]
    (document,), batch = small_documents(frozen, spans), small_batch("medusa", frozen, spans)
    entry, t = (0, 4) if place == "first" else (-1, 7)  # s-1 and e-2
    assert batch.rows[entry] == t
    index = torch.arange(len(batch.rows))[[entry]]
    assert torch.equal(head.states(batch, index)[0], document.last_all[t])


def test_nothing_supervised_is_a_zero_loss_with_gradients():
    frozen = small_frozen()
    head = small_head("medusa", medusa_heads=2)
    got = MedusaStep(head, frozen)(small_batch("medusa", frozen, [(5, [(3, 3)])]), torch.ones(2))
    got.loss.backward()
    assert got.loss == 0
    assert all(parameter.grad is not None for parameter in head.parameters())


@pytest.fixture(scope="module")
def medusa_shards(tiny_rows_dir: Path, tiny_target_dir: Path, tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("shards") / "medusa"
    settings = {"codec": "fp32", "dtype": "fp32", "device": "cpu", "batch_tokens": 512, "show": False}
    extract(tiny_rows_dir, str(tiny_target_dir), out, features="medusa", **settings)
    return out


def test_a_run_learns_and_is_the_same_from_shards_of_any_kind(
    medusa_shards, tiny_shards_dir, tiny_shards_eagle1_dir, tmp_path
):
    changes = [
        "head.draft_vocab_size=128",
        "head.medusa_heads=3",
        "data.tokens_per_step=512",
        "data.held_out=2",
    ]
    changes += [
        "run.steps=12",
        "run.precision=fp32",
        "schedule.warmup_steps=2",
        "optim.lr=0.02",
        "run.eval_every=12",
        "run.log_every=1",
    ]
    heads = []
    for number, shards in enumerate((medusa_shards, tiny_shards_dir, tiny_shards_eagle1_dir)):
        run = tmp_path / f"run{number}"
        train(shards, load_recipe("medusa", changes), run, show=False)
        heads.append(load_head(run / "last"))
    for other in heads[1:]:
        for ours, theirs in zip(heads[0].parameters(), other.parameters(), strict=True):
            torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-4)
    assert heads[0].config.medusa_heads == 3
    losses = [line["loss"] for line in read_metrics(tmp_path / "run0") if "loss" in line]
    assert all(last < 0.9 * first for first, last in zip(losses[0], losses[-1], strict=True))


def test_a_rehearsal_promises_no_more_guesses_than_there_are_heads(medusa_shards, monkeypatch):
    opened = []

    def opening(folder, **given):
        opened.append(given)
        return open_shards(folder, **given)

    monkeypatch.setattr(source, "open_shards", opening)
    monkeypatch.setattr(dry_run, "MOST_STEPS", 1)
    changes = ["head.medusa_heads=1", "run.eval_gamma=3", "run.precision=fp32", "data.held_out=2"]
    found = dry_run.dry_run(medusa_shards, load_recipe("medusa", changes), show=False)
    assert 1.5 < found.longest <= 2
    assert opened == [{"rank": 0, "world": 1, "dtype": torch.float32}]  # as a run opens them
