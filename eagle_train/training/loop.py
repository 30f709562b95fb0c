"""The training loop, one for every kind of head and any number of processes.

An optimizer step is a window of whole rows (shards/sampler.py). Its loss is a sum over rows divided by
the number of rows counted in the whole window, which spans alone tell; so every micro-batch on every
process divides by the same counts, and gradients are simply summed.
"""

from __future__ import annotations

import math
import sys
import time
import warnings
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

from eagle_train.config import Recipe
from eagle_train.errors import UserError
from eagle_train.progress import Progress, counted, progress
from eagle_train.training.description import describe, summary
from eagle_train.training.interrupt import Interrupt
from eagle_train.training.loader import ReadAhead
from eagle_train.training.metrics import Log, Meter, evaluated, note
from eagle_train.training.processes import join_processes
from eagle_train.training.session import Session, open_session
from eagle_train.training.source import LiveTarget


def train(
    shards: str | Path,
    recipe: Recipe,
    out: str | Path,
    *,
    live: LiveTarget | None = None,
    resume: bool = False,
    init_from: str | None = None,
    trackers: Sequence[str] = (),
    deepspeed: str | None = None,
    show: bool = True,
) -> dict[str, Any]:
    """Train a head on a folder of shards into the run folder `out`; return a summary.

    With a `live` target `shards` is a folder of prepared rows, whose features are computed meanwhile.

    The same call on an interrupted run goes on from its newest checkpoint, bit for bit on a CPU unless
    run.minutes is set. Raises UserError for whatever the user must change, and KeyboardInterrupt, after
    saving, when interrupted.
    """
    processes = join_processes()
    session = open_session(
        processes,
        Path(shards),
        recipe,
        Path(out),
        live=live,
        resume=resume,
        init_from=init_from,
        deepspeed=deepspeed,
    )
    with closing(session.loader.source):
        return run_session(session, trackers, show and processes.is_main)


def run_session(session: Session, trackers: Sequence[str] = (), show: bool = True) -> dict[str, Any]:
    """Train an open session to its end, as `train` does; return the summary."""
    out, recipe, processes = session.out, session.recipe, session.processes
    if show:
        print(describe(session), file=sys.stderr)
    if session.finished and not session.evaluation_due:
        session.check_taken()
        return summary(session)
    with (
        Interrupt() as interrupt,
        closing(Log(out, session.state, recipe.to_dict(), trackers, processes.is_main)) as log,
        progress("train", session.num_steps, "steps", show, before=session.state.step) as bar,
    ):
        done = _catch_up(session, interrupt, log) and _loop(session, interrupt, log, bar)
    if done and processes.is_main:
        session.loader.source.trained_past(sys.maxsize)
    if not done:
        if processes.is_main:
            step = session.state.step
            saved = f"saved at step {step:,}" if step else "stopped before the first step"
            print(f"{out}: {saved}; the same command again goes on from there", file=sys.stderr)
        raise KeyboardInterrupt
    session.check_taken()
    return summary(session)


def _catch_up(session: Session, interrupt: Interrupt, log: Log) -> bool:
    """Make the evaluation due where the run stands: the untrained head's, or one that was cut short.

    Returns False when interrupted.
    """
    if session.evaluation_due:
        found = session.evaluate(interrupt)
        if found is None:
            return False
        session.judge(found)
        session.check_folder()
        log.write({"epoch": session.epoch, **evaluated(found)})
        if session.state.step > 0:
            session.save()
    return True


def _loop(session: Session, interrupt: Interrupt, log: Log, bar: Progress) -> bool:
    """Train until the budget is used up; return False where interrupted before, with all saved."""
    if session.finished:  # all but its last evaluation was done before
        return True
    processes, engine, state, run = session.processes, session.engine, session.state, session.recipe.run
    meter = Meter(session.loader.num_steps, processes.device)
    still, reported = 0, False  # steps whose gradient was 0: none of their labels can be drafted
    begun = time.monotonic() - state.seconds
    stop, words = False, ""
    source = session.loader.source
    # at the end the source goes first: the thread that reads ahead may be waiting for a row
    with closing(ReadAhead(session.loader.training(session.windows()))) as micros, closing(source):
        for micro in micros:
            batch, counts = micro.batch.to(processes.device), micro.counts.to(processes.device)
            meter.add(engine.accumulate(batch, counts, micro.closes))
            if not micro.closes:
                continue
            factor = session.lr_factor
            norm = engine.update(factor)
            if not math.isfinite(norm):
                session.count_skipped()
            state.step += 1
            still += norm == 0
            if processes.is_main:
                source.trained_past(state.step)
            state.tokens += micro.window.tokens
            meter.close_window(micro.window.tokens, taken=math.isfinite(norm))
            state.seconds, stop = processes.agree(time.monotonic() - begun, interrupt.asked)

            found = None
            if not stop and session.evaluation_due:
                with meter.paused():
                    found = session.evaluate(interrupt)
                stop = found is None
            better = found is not None and session.judge(found)
            end = stop or session.finished
            save = better or end or state.step % run.save_every == 0
            if save or found or state.step % run.log_every == 0:
                report = meter.take(processes, micros.waited)
                lr = session.recipe.optim.lr * factor
                session.check_folder()
                log.write(
                    {"epoch": micro.window.epoch, **report, "lr": lr, "grad_norm": norm, **evaluated(found)}
                )
                words = note(report, state, run.minutes)
                if not reported and still == state.step and processes.is_main:
                    warnings.warn(_out_of_reach(session))
                reported = True
            if save:
                with meter.paused():
                    session.save()
            bar.advance(1, words)
            if end:
                break
    if not stop and still == state.step:
        raise UserError(f"{_out_of_reach(session)}, and choose another --out")
    return not stop


def _out_of_reach(session: Session) -> str:
    """Say that no step so far had a gradient, why, and what to do."""
    found = f"{session.out}: nothing was learned in {counted(session.state.step, 'step')}, the gradient was 0"
    if not session.engine.head.config.reduced_vocabulary:
        return f"{found}; look at the weights of the recipe's loss"
    facts = session.facts
    return (
        f"{found}: the target's first choice is nowhere among the {facts['draft_vocab_size']:,} tokens that "
        f"the head can draft, though {facts['coverage']:.1%} of the answers' own tokens are; set a larger "
        "head.draft_vocab_size (null: every token), or train on answers that the target wrote"
    )
