"""What a run is about, in words before it begins and in figures once it has ended."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from eagle_train.progress import counted, parameters_text
from eagle_train.shards.checking import removed_rows

if TYPE_CHECKING:
    from eagle_train.training.session import Session


def describe(session: Session) -> str:
    """Return what is about to be trained, one line or more."""
    facts, run, steps = session.facts, session.recipe.run, session.num_steps
    vocabulary = f"draft vocabulary {facts['draft_vocab_size']:,} ({facts['coverage']:.1%} of answer tokens)"
    length = f"{run.minutes:g} minutes" if steps is None else counted(steps, "step")
    first = (
        f"{session.recipe.head.kind} head of {parameters_text(facts['num_parameters'])}, {vocabulary}; "
        f"{counted(facts['train_rows'], 'row')} to train on, {facts['held_out_rows']:,} held out; "
        f"{length} in {facts['precision']} on {facts['processes']} x {facts['device']}"
    )
    if facts["label_top_k"]:
        first += f"; labels are the {facts['label_top_k']} likeliest tokens"
        if facts["label_mass"] is not None:
            first += f", {facts['label_mass']:.2%} of the target's probability"
        first += "; the rest is spread evenly"
    if facts["rows_without_labels"]:
        first += f"; {counted(facts['rows_without_labels'], 'row')} left out, all answers single tokens"
    lines, source = [first], session.loader.source
    if removed := removed_rows(source.folder, source.info):
        lines.append(
            f"{counted(removed, 'row')} of {source.folder} were removed by eagle shards prune; the same "
            "eagle extract makes them anew"
        )
    if session.features:
        lines.append(session.features)
    warm_up = session.recipe.schedule.warmup_steps
    if steps is not None and 2 * warm_up > steps:
        lines.append(
            f"warm-up takes {counted(warm_up, 'step')}, the run has {steps:,}, so little is learned; train "
            f"longer, in smaller steps, or give --set schedule.warmup_steps={steps // 10}"
        )
    if session.state.step:
        done = ", where it is finished" if session.finished else ""
        lines.append(f"going on from step {session.state.step:,}{done}")
    if run.minutes:
        lines.append(
            f"ends after run.minutes={run.minutes:g} at the latest (--set run.minutes=null lifts that), so a "
            "resumed run is not bit-equal to an unbroken one"
        )
    return "\n".join(f"{session.out}: {line}" for line in lines)


def summary(session: Session) -> dict[str, Any]:
    """Return what was made, for people and machines."""
    state = session.state
    return {
        "out": str(session.out),
        "head": str(session.out / "best"),
        "recipe": session.recipe.name,
        "kind": session.recipe.head.kind,
        "steps": state.step,
        "tokens": state.tokens,
        "seconds": round(state.seconds, 1),
        "skipped": state.skipped,
        "tau": state.tau,
        "best_tau": state.best_tau,
        "best_step": state.best_step,
        "out_of_patience": session.out_of_patience,
        "gamma": session.recipe.run.eval_gamma,
        "target": session.engine.head.config.target,
        **session.facts,
    }
