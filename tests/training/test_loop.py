"""The loop's promises: what is trained, what is skipped, what is kept, and when it ends."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import time

import pytest
import torch

from eagle_train.errors import UserError
from eagle_train.io.tensors import load_tensors
from eagle_train.losses.acceptance import AcceptanceCounts
from eagle_train.shards.reader import Shards, open_shards
from eagle_train.training import loop
from eagle_train.training.checkpoints import read_head
from eagle_train.training.dry_run import dry_run
from eagle_train.training.engine import Engine
from eagle_train.training.held_out import predict_chain, split
from eagle_train.training.interrupt import Interrupt
from eagle_train.training.loader import Loader
from eagle_train.training.loop import train
from eagle_train.training.metrics import read_metrics
from eagle_train.training.processes import join_processes
from eagle_train.training.session import Session, open_session


def test_training_lowers_the_loss_and_reports_it(tmp_path, tiny, tiny_shards_dir):
    run = tmp_path / "run"
    recipe = tiny("run.steps=30", "data.tokens_per_step=2048", "data.micro_tokens=1024", "optim.lr=5e-3")
    summary = train(tiny_shards_dir, recipe, run, show=False)
    lines = read_metrics(run)
    assert [line["step"] for line in lines] == list(range(31))
    assert lines[-1]["loss"][0] < 0.8 * lines[1]["loss"][0]
    assert lines[-1]["accuracy"][0] > lines[1]["accuracy"][0]
    assert {
        "step",
        "epoch",
        "tokens",
        "loss",
        "accuracy",
        "lr",
        "tokens_per_second",
        "grad_norm",
        "data_wait",
    } <= set(lines[1])
    assert all(len(line["loss"]) == 3 for line in lines[1:])
    assert [line["step"] for line in lines if "tau" in line] == [0, *range(4, 31, 4), 30]
    assert lines[-1]["tokens"] == summary["tokens"]
    assert lines[-1]["epoch"] > 0


def test_weights_and_adam_stay_float32_under_bf16(tmp_path, train_tiny, weights):
    train_tiny("run", "run.precision=bf16", "run.steps=2")
    stored = weights(tmp_path / "run" / "last")
    assert {value.dtype for value in stored.values()} == {torch.float32, torch.int64, torch.bool}
    assert {value.dtype for name, value in stored.items() if "/" in name} == {torch.float32}
    config = json.loads((tmp_path / "run" / "last" / "config.json").read_text())
    assert config["dtype"] == "float32"


def test_the_frozen_target_is_neither_optimised_nor_changed(train_tiny, monkeypatch):
    seen = []

    def spy(session, *rest):
        before = session.frozen.embedding.clone(), session.frozen.lm_head.clone()
        seen.append((session, before))
        return original(session, *rest)

    original = loop._loop
    monkeypatch.setattr(loop, "_loop", spy)
    train_tiny("run")
    [(session, (embedding, lm_head))] = seen
    assert torch.equal(session.frozen.embedding, embedding)
    assert torch.equal(session.frozen.lm_head, lm_head)
    optimised = {p.data_ptr() for p in session.engine.optimizers.names}
    assert optimised == {p.data_ptr() for p in session.engine.head.parameters()}
    assert not optimised & {session.frozen.embedding.data_ptr(), session.frozen.lm_head.data_ptr()}


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_gradient_that_is_not_finite_skips_the_step_and_is_counted(
    value, tmp_path, tiny, tiny_shards_dir, poison, weights
):
    poison(5, value)
    run = tmp_path / "run"
    recipe = tiny("run.steps=null", "run.epochs=2", "data.held_out=0", "data.tokens_per_step=600")
    summary = train(tiny_shards_dir, recipe, run, show=False)
    assert summary["skipped"] == 2, "once an epoch"
    assert all(bool(torch.isfinite(value).all()) for value in weights(run / "last").values())
    lines = read_metrics(run)
    assert sum(line["grad_norm"] is None for line in lines) == 2
    assert "NaN" not in (run / "metrics.jsonl").read_text()


def test_too_many_skipped_steps_stop_the_run(tmp_path, tiny, tiny_shards_dir, poison):
    poison(5, float("nan"))
    recipe = tiny("run.steps=null", "run.epochs=3", "run.max_skipped=1", "data.held_out=0")
    with pytest.raises(UserError, match=r"NaN or infinite in 2 steps, run.max_skipped is 1"):
        train(tiny_shards_dir, recipe, tmp_path / "run", show=False)


@pytest.mark.parametrize("taken", [0, 1])
def test_a_short_run_of_skipped_steps_ends_in_one_line_every_time(
    taken, tmp_path, tiny, tiny_shards_dir, monkeypatch
):
    norms = iter([1.0] * taken + [float("nan")] * 9)
    monkeypatch.setattr(Engine, "update", lambda self, factor: next(norms))
    for _ in range(2):
        with pytest.raises(UserError, match="only 1 of 4 steps was" if taken else "no step was taken"):
            train(tiny_shards_dir, tiny("run.steps=4"), tmp_path / "run", show=False)


def scripted(monkeypatch, taus):
    values = iter(taus)

    def evaluate(self, interrupt):
        return AcceptanceCounts(100, round(100 * next(values)), (100,))

    monkeypatch.setattr(Session, "evaluate", evaluate)


def test_best_is_chosen_by_acceptance_length_and_kept_beside_the_last_two(
    tmp_path, tiny, tiny_shards_dir, monkeypatch
):
    scripted(monkeypatch, [1.0, 1.3, 1.6, 1.2, 1.5, 1.4, 1.1])
    run = tmp_path / "run"
    summary = train(
        tiny_shards_dir, tiny("run.eval_every=2", "run.save_every=2", "run.steps=12"), run, show=False
    )
    assert (summary["best_step"], summary["best_tau"], summary["tau"]) == (4, 1.6, 1.1)
    assert (run / "best").resolve().name == "step-000004"
    assert (run / "last").resolve().name == "step-000012"
    kept = sorted(p.name for p in (run / "checkpoints").iterdir())
    assert kept == ["step-000004", "step-000010", "step-000012"]


def test_a_new_best_is_saved_although_no_save_is_due(tmp_path, train_tiny, monkeypatch):
    scripted(monkeypatch, [1.0, 1.3, 1.1, 1.1, 1.1])
    run = tmp_path / "run"
    train_tiny("run", "run.eval_every=2", "run.save_every=100")
    assert (run / "best").resolve().name == "step-000002"


def test_patience_ends_a_run_that_no_longer_improves(tmp_path, tiny, tiny_shards_dir, monkeypatch):
    scripted(monkeypatch, [1.0, 1.3, 1.2, 1.4, 1.3, 1.4, 1.6])
    recipe = tiny("run.eval_every=1", "run.steps=50", "run.patience=2")
    summary = train(tiny_shards_dir, recipe, tmp_path / "run", show=False)
    assert (summary["steps"], summary["best_step"], summary["best_tau"]) == (5, 3, 1.4)
    assert summary["out_of_patience"]
    assert train(tiny_shards_dir, recipe, tmp_path / "run", show=False)["steps"] == 5
    assert (tmp_path / "run" / "best").resolve().name == "step-000003"


def test_an_average_is_what_is_evaluated_and_saved(tmp_path, train_tiny, weights, shards_of):
    train_tiny("run", "optim.ema=0.5", "run.steps=6", "optim.lr=0.02")
    stored = weights(tmp_path / "run" / "last")
    assert not torch.allclose(stored["fc.weight"], stored["trained/fc.weight"], atol=1e-4)
    line = read_metrics(tmp_path / "run")[-1]
    shards = open_shards(shards_of("eagle3"))
    loader = Loader(shards, "eagle3", 3, 9999)
    held_out = split(shards.conversation_ids, 2.0)[1]
    head = read_head(tmp_path / "run" / "last")
    found = predict_chain(head, shards.frozen_target(), loader.evaluation(held_out), 3)
    assert line["tau"] == round(found.tau, 5)
    plain = train_tiny("plain", "run.steps=6", "optim.lr=0.02")
    trained = weights(tmp_path / "plain" / "last")
    assert torch.equal(trained["fc.weight"], stored["trained/fc.weight"]), "the average changes no training"
    assert plain["steps"] == 6


def test_without_held_out_conversations_best_is_the_last(tmp_path, train_tiny):
    run = tmp_path / "run"
    summary = train_tiny("run", "data.held_out=0")
    assert summary["best_tau"] is None
    assert (run / "best").resolve() == (run / "last").resolve()


def test_a_target_whose_choices_cannot_be_drafted_teaches_nothing_and_this_is_said(
    tmp_path, train_tiny, tiny, tiny_shards_dir, monkeypatch
):
    """Every answer token can be drafted, the target's own choices cannot: said at once and at the end."""
    shards = open_shards(tiny_shards_dir)
    alien = max(set(range(300)) - set(shards.supervised_frequencies))
    read, given = Shards.read, "head.draft_vocab_size=250"

    def reading(self, row):
        found = read(self, row)
        return dataclasses.replace(found, label_argmax=torch.full_like(found.label_argmax, alien))

    monkeypatch.setattr(Shards, "read", reading)
    words = (
        r"the target's first choice is nowhere among the 250 tokens that the head can draft, though 100\.0%"
    )
    with (
        pytest.warns(UserWarning, match=f"nothing was learned in 1 step, .*{words}"),
        pytest.raises(UserError, match=f"in 3 steps, .*{words}.*larger head.draft_vocab_size"),
    ):
        train_tiny("run", "run.steps=3", given)
    assert read_metrics(tmp_path / "run")[-1]["loss"][0] == 0.0
    with pytest.raises(
        UserError, match=r"dry run: the row that it took has nothing to learn from: .*run\.seed"
    ):
        dry_run(tiny_shards_dir, tiny(given), show=False)
    assert train_tiny("whole", "run.steps=1", "head.draft_vocab_size=null")["steps"] == 1


def test_minutes_end_the_run_with_the_learning_rate_down(tmp_path, tiny, tiny_shards_dir):
    run = tmp_path / "run"
    recipe = tiny("run.steps=null", "run.minutes=0.02", "schedule.shape=linear", "data.held_out=0")
    started = time.monotonic()
    summary = train(tiny_shards_dir, recipe, run, show=False)
    assert summary["seconds"] >= 1.2
    assert time.monotonic() - started < 60
    lines = [line for line in read_metrics(run) if line["step"] > 0]
    assert lines[-1]["lr"] < lines[len(lines) // 2]["lr"] < 1e-3
    again = train(tiny_shards_dir, recipe, run, show=False)
    assert again["steps"] == summary["steps"], "a run whose minutes are used up is finished"


def test_a_budget_of_tokens_ends_with_the_step_that_reaches_it(tmp_path, tiny, tiny_shards_dir):
    recipe = tiny("run.steps=null", "run.tokens=1000", "data.held_out=0")
    summary = train(tiny_shards_dir, recipe, tmp_path / "run", show=False)
    lines = read_metrics(tmp_path / "run")
    assert lines[-2]["tokens"] < 1000 <= summary["tokens"]


def test_the_first_signal_asks_and_a_late_second_one_insists(monkeypatch):
    before = signal.getsignal(signal.SIGINT)
    with Interrupt() as interrupt:
        assert not interrupt.asked
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)  # the launcher's copy of the same Ctrl-C
        os.kill(os.getpid(), signal.SIGTERM)
        assert interrupt.asked
        monkeypatch.setattr(interrupt, "_asked_at", time.monotonic() - 2)
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is before


def test_an_interrupted_evaluation_is_no_evaluation(tmp_path, tiny, tiny_shards_dir):
    session = open_session(join_processes(), tiny_shards_dir, tiny(), tmp_path / "run")
    interrupt = Interrupt()
    assert session.evaluate(interrupt).rounds > 0
    interrupt.asked = True
    assert session.evaluate(interrupt) is None


def test_a_full_disk_is_one_line_and_the_last_checkpoint_stays(tmp_path, train_tiny, monkeypatch):
    run = tmp_path / "run"
    train_tiny("run")
    before = load_tensors(run / "last" / "model.safetensors")[0]

    replace = os.replace

    def full(source, to):
        if os.path.basename(to).startswith("step-"):
            raise OSError(28, "No space left on device")
        replace(source, to)

    monkeypatch.setattr("eagle_train.training.checkpoints.os.replace", full)
    with pytest.raises(UserError, match=r"step-000012.*No space left.*free some room"):
        train_tiny("run", "run.steps=12", resume=True)
    monkeypatch.undo()
    after = load_tensors(run / "last" / "model.safetensors")[0]
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert train_tiny("run", "run.steps=12", resume=True)["steps"] == 12
