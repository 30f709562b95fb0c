"""Everything one process holds while it trains: head, data order, optimizer, position."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from eagle_train.config import Recipe
from eagle_train.errors import UserError
from eagle_train.losses.acceptance import AcceptanceCounts
from eagle_train.progress import counted
from eagle_train.shards.row_source import RowSource
from eagle_train.shards.sampler import Plan, Window
from eagle_train.training import build, checkpoints, run_folder
from eagle_train.training.checkpoints import State
from eagle_train.training.engine import Engine
from eagle_train.training.held_out import order_of, predict_chain, rows_of
from eagle_train.training.interrupt import Interrupt
from eagle_train.training.loader import Loader
from eagle_train.training.optim import lr_factor
from eagle_train.training.processes import Processes, pick_precision
from eagle_train.training.source import LiveTarget, open_source
from eagle_train.training.zero import ZeroEngine, read_zero_config

if TYPE_CHECKING:
    from eagle_train.shards.frozen_target import FrozenTarget


@dataclass
class Session:
    """One process's part of a run. Use through `open_session`."""

    processes: Processes
    recipe: Recipe
    out: Path
    frozen: FrozenTarget
    engine: Engine | ZeroEngine
    loader: Loader
    plan: Plan
    held_out: list[int]
    num_steps: int | None  # None: by the clock alone
    state: State = field(default_factory=State)
    facts: dict[str, Any] = field(default_factory=dict)
    features: str = ""  # how rows come by their features, '' from finished shards
    held: run_folder.Lock | None = None  # the lock of the run folder, until this session is gone

    def windows(self) -> Iterator[Window]:
        """Return the windows that are still to be trained on, in order."""
        stop = None if self.num_steps is None else max(0, self.num_steps - self.state.step)
        return itertools.islice(self.plan.windows(self.state.step), stop)

    @property
    def time_share(self) -> float:
        """The share of run.minutes that is used up, 0 without such a budget."""
        minutes = self.recipe.run.minutes
        return self.state.seconds / (60 * minutes) if minutes else 0.0

    @property
    def lr_factor(self) -> float:
        """The share of the peak learning rates that the next step takes."""
        return lr_factor(self.recipe.schedule, self.state.step, self.num_steps, self.time_share)

    @property
    def finished(self) -> bool:
        """True when the run's budget is used up, or its patience."""
        out_of_steps = self.num_steps is not None and self.state.step >= self.num_steps
        return self.time_share >= 1 or out_of_steps or self.out_of_patience

    @property
    def out_of_patience(self) -> bool:
        """True after run.patience evaluations without a new best."""
        patience = self.recipe.run.patience
        return patience is not None and self.state.num_worse >= patience

    @property
    def evaluation_due(self) -> bool:
        """True where the acceptance of the weights as they are is wanted and not known yet."""
        due = self.state.step % self.recipe.run.eval_every == 0 or self.finished
        return due and bool(self.held_out) and self.state.evaluated_step != self.state.step

    @property
    def epoch(self) -> int:
        """The epoch of the latest step, 0 before any."""
        return next(self.plan.windows(max(0, self.state.step - 1))).epoch

    def evaluate(self, interrupt: Interrupt) -> AcceptanceCounts | None:
        """Return the acceptance on all held-out rows, None when interrupted."""
        gamma, device = self.recipe.run.eval_gamma, self.processes.device
        batches = (batch.to(device) for batch in self.loader.evaluation(self.held_out))
        with self.engine.evaluated() as head, self.engine.autocast():
            going_on = itertools.takewhile(lambda _: not interrupt.asked, batches)
            mine = predict_chain(head, self.frozen, going_on, gamma)
        counts = torch.tensor([interrupt.asked, mine.rounds, mine.tokens, *mine.histogram], device=device)
        stopped, rounds, tokens, *histogram = self.processes.sum(counts).tolist()
        return None if stopped else AcceptanceCounts(rounds, tokens, tuple(histogram))

    def judge(self, found: AcceptanceCounts) -> bool:
        """Take note of an evaluation; return True when it is the best so far of a trained head."""
        return self.state.judge(self.state.step, found.tau)

    def save(self) -> None:
        """Write a checkpoint and drop those no longer kept; other processes wait."""
        with self.engine.saved() as (head, trainer):
            self.check_folder()
            if self.processes.is_main:
                checkpoints.save_checkpoint(self.out, head, trainer, self.state)
                checkpoints.prune(self.out, self.recipe.run.keep_last, self.state)
        self.processes.wait()

    def check_folder(self) -> None:
        """Raise UserError on the main process where the run's own records are no longer in its folder."""
        if self.processes.is_main:
            run_folder.check_there(self.out)

    def check_taken(self) -> None:
        """Raise UserError where at least half of the run's steps were skipped, however short it was."""
        steps, skipped = self.state.step, self.state.skipped
        if skipped and 2 * skipped >= steps:
            taken = f"only {steps - skipped:,} of {steps:,} steps was" if steps > skipped else "no step was"
            raise UserError(
                f"{self.out}: {taken} taken, the gradient was NaN or infinite in {skipped:,}: this head has "
                "not learned; lower the learning rate or the loss weights, or look for bad features in the "
                "shards, and choose another --out"
            )

    def count_skipped(self) -> None:
        """Count a step whose gradient was not finite; UserError past run.max_skipped of them."""
        self.state.skipped += 1
        if self.state.skipped > self.recipe.run.max_skipped:
            raise UserError(
                f"{self.out}: step {self.state.step + 1}: the gradient was NaN or infinite in "
                f"{counted(self.state.skipped, 'step')}, run.max_skipped is {self.recipe.run.max_skipped}; "
                f"lower the "
                "learning rate or look for bad features in the shards. The last checkpoint is kept"
            )


def open_session(
    processes: Processes,
    place: Path,
    recipe: Recipe,
    out: Path,
    *,
    live: LiveTarget | None = None,
    resume: bool = False,
    init_from: str | None = None,
    deepspeed: str | None = None,
) -> Session:
    """Build a new run, or load the newest checkpoint of the one in `out`. Raises UserError.

    `place` holds shards, or rows where a `live` target computes their features.
    """
    dtype = pick_precision(recipe.run.precision, processes.device)
    held = run_folder.lock(out) if processes.is_main else None
    source: RowSource | None = None
    try:
        checkpoint = run_folder.look(out, resume, init_from)
        done = 0 if checkpoint is None else checkpoints.load_state(checkpoint).step
        source = open_source(place, recipe, processes, dtype, live, out, done)
        init_from = run_folder.decide(out, recipe, source, resume, init_from)
        session = build_session(processes, source, recipe, out, checkpoint, init_from, deepspeed)
    except BaseException:
        if source is not None:
            source.close()
        run_folder.release(out, held)
        raise
    session.held = held
    _write_start(session, source, checkpoint, init_from)
    return session


def build_session(
    processes: Processes,
    source: RowSource,
    recipe: Recipe,
    out: Path,
    checkpoint: Path | None,
    init_from: str | None,
    deepspeed: str | None,
) -> Session:
    """Build one process's part of a run in memory, from `checkpoint`, a head or anew. Writes nothing."""
    train_rows, held_out, facts = rows_of(source, recipe, source.folder)
    device, run = processes.device, recipe.run
    dtype = pick_precision(run.precision, device)
    frozen = source.frozen_target()
    if checkpoint is not None:
        head = checkpoints.read_head(checkpoint)
    elif init_from is not None:
        head = build.warm_head(init_from, recipe, source, frozen)
    else:
        head = build.new_head(recipe, source, frozen)
    head.to(device)
    frozen = frozen.to(device, dtype)
    step = build.head_step(head, frozen, recipe)
    engine: Engine | ZeroEngine
    if deepspeed is None:
        engine = Engine(processes, step, recipe.optim, dtype)
    else:
        engine = ZeroEngine(processes, step, recipe.optim, dtype, read_zero_config(deepspeed))
    if checkpoint is not None:
        engine.load(checkpoint)
    plan = order_of(recipe, train_rows, source.lengths)
    loader = Loader(
        source,
        recipe.head.kind,
        step.num_steps,
        recipe.data.micro_tokens,
        processes.rank,
        processes.world,
        noise=recipe.loss.noise if recipe.head.kind == "eagle1" else 0.0,
        seed=run.seed,
        pinned=device.type == "cuda",
    )
    return Session(
        processes=processes,
        recipe=recipe,
        out=out,
        frozen=frozen,
        engine=engine,
        loader=loader,
        plan=plan,
        held_out=held_out,
        num_steps=plan.num_steps(run.epochs, run.steps, run.tokens),
        state=State() if checkpoint is None else checkpoints.load_state(checkpoint),
        facts={
            "num_parameters": build.num_parameters(head),
            "draft_vocab_size": head.config.draft_vocab_size,
            "coverage": round(build.vocabulary_coverage(head, source), 5),
            "label_top_k": source.info.get("label_top_k"),
            "label_mass": source.info.get("label_mass"),
            "precision": str(dtype).removeprefix("torch."),
            "device": device.type,
            "processes": processes.world,
            "deepspeed": deepspeed,
            **facts,
        },
        features=source.keep(held_out),
    )


def _write_start(session: Session, source: RowSource, checkpoint: Path | None, init_from: str | None) -> None:
    """Let the main process write the run's records, once every process has decided what to do."""
    session.processes.wait()
    if session.processes.is_main:
        if checkpoint is None and (session.out / run_folder.RECIPE).is_file():
            print(f"{session.out}: holds a run without any checkpoint: begins at step 0", file=sys.stderr)
        run_folder.record_run(session.out, session.recipe, source, init_from, session.facts)
        checkpoints.sweep(session.out, session.state.step)
        if checkpoint is not None:
            checkpoints.point(session.out, session.state)
    session.processes.wait()
