"""The draft that is fastest on this machine: its times, the head's acceptance, and the best of both."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from eagle_train.decoding.drafters import HeadDrafter
from eagle_train.decoding.law import own_law
from eagle_train.decoding.loop import Settings, plain
from eagle_train.decoding.sampling import Sampling
from eagle_train.decoding.shapes import Chain, Dynamic, Shape, Static, read_shape, write_shape
from eagle_train.decoding.trees import StaticShape, best_paths
from eagle_train.errors import UserError
from eagle_train.evaluation.evaluate import evaluate
from eagle_train.evaluation.heads import open_head
from eagle_train.evaluation.machine import PASSES, Machine, measure
from eagle_train.evaluation.outputs import check_output, refuse_foreign
from eagle_train.evaluation.questions import Question, conversations, read_questions
from eagle_train.evaluation.replay import Tables, replay_chain, replay_paths, tables
from eagle_train.evaluation.report import draft_name, own_names
from eagle_train.evaluation.tree_replay import TreeTables, replay_tree, tree_tables
from eagle_train.heads.disk import Head
from eagle_train.heads.medusa import MedusaHead
from eagle_train.progress import Progress, counted, progress
from eagle_train.shards.batches import PackedBatch, pack
from eagle_train.shards.row_source import ShardRow
from eagle_train.targets.capture import FeatureTap
from eagle_train.targets.load import Target, load_target

DEPTH, RANKS = 8, 10  # of the tables: guesses in a row, ranks told apart
TREE_DEPTH, TOP_KS = 6, (4, 8)  # of dynamic trees
_BUDGETS = (3, 5, 7, 11, 15, 25, 39, 59)  # guesses of a tree
# to learn from at least: shares of so many tokens stand within 3 points (standard error 1 / (2 sqrt n)), as
# far apart as drafts are told; and the words of fewer prompts are those of their topics
ENOUGH_TOKENS, ENOUGH_PROMPTS = 256, 4
_STOPS = (0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6)


@dataclass(frozen=True)
class Candidate:
    """One draft and what is expected of it."""

    shape: Shape
    tau: float
    seconds: float  # of a round

    @property
    def rate(self) -> float:
        """Tokens per second."""
        return self.tau / self.seconds


def tune(
    head: str | Path | Head,
    target: str | Target,
    questions: str | Path | None = None,
    *,
    num_questions: int = 16,
    max_new_tokens: int = 64,
    sampling: Sampling | None = None,
    dtype: str = "auto",
    chat_template: str | None = None,
    seed: int = 0,
    trust_remote_code: bool = False,
    processors: bool = True,
    out: str | Path | None = None,
    show: bool = True,
) -> dict[str, Any]:
    """Choose the chain or tree that maximises tokens per second; measure it beside plain decoding.

    Every other question is answered by the target, and the head's acceptance on those answers is replayed for
    every candidate; together with the machine's times that predicts its speed. The best is decoded on the
    remaining questions. Returns ``machine``, ``candidates`` (best first), ``best``, ``predicted_speedup``,
    ``measured_speedup``, ``wins``. `out` writes the shape for ``--draft``. `processors` as in `evaluate`.
    Raises UserError as it does.
    """
    if out is not None:
        if Path(out).suffix != ".json":
            raise UserError(f"--out {out}: wanted a file ending in .json, as --draft takes it")
        check_output("--out", out)
        refuse_foreign("--out", out, _is_draft, "draft of eagle tune")
    if not isinstance(target, Target):
        target = load_target(target, dtype=dtype, trust_remote_code=trust_remote_code)
    # a copy: measuring casts it
    loaded = open_head(head, target) if isinstance(head, str | Path) else copy.deepcopy(head)
    if isinstance(loaded, MedusaHead):
        raise UserError("eagle tune: got Medusa heads, wanted an EAGLE head")
    sampling, some = sampling or Sampling(), read_questions(questions, num_questions)
    sampling = own_law(target, sampling) if processors else sampling
    if len(some) < 2:
        raise UserError("eagle tune: got one question, wanted at least two: to learn from and to measure on")
    settings = Settings(max_new_tokens=max_new_tokens, sampling=sampling, seed=seed)
    learnt = some[::2]
    with progress("tune", len(learnt) + PASSES + len(TOP_KS), "steps", show) as bar:
        batch, prompt = answered(loaded, target, learnt, settings, chat_template, bar)
        machine = measure(loaded, target, prompt, bar)
        trees = []
        for top_k in TOP_KS:
            drafter = HeadDrafter(loaded, target, Dynamic(top_k=top_k), sampling)
            trees.append(tree_tables(drafter, batch, top_k, TREE_DEPTH, _BUDGETS))
            bar.advance(1, "growing trees")
    frozen = target.frozen().to(dtype=torch.float32)
    found = tables(_in_fp32(loaded, target), frozen, batch, DEPTH, sampling)
    ranked = _ranked(candidates(found, machine, sampling.greedy, trees))
    best, alone = ranked[0], 1 / machine.plain_token()
    report = evaluate(
        loaded,
        target,
        some[1::2],
        [best.shape],
        sampling=sampling,
        max_new_tokens=max_new_tokens,
        max_turns=1,
        chat_template=chat_template,
        seed=seed,
        processors=processors,
        show=show,
        command="tune",
    )
    if out is not None:
        refuse_foreign("--out", out, _is_draft, "draft of eagle tune")  # what came there meanwhile
        write_shape(out, best.shape)
    return {
        "head": str(head) if isinstance(head, str | Path) else "as given",
        "target": target.name,
        "temperature": sampling.temperature,
        "processors": report["processors"],
        "dtype": report["dtype"],
        "device": report["device"],
        "threads": report["threads"],
        "machine": machine.figures,
        "candidates": [_figures(one, alone) for one in ranked],
        "best": {**_figures(best, alone), "shape": best.shape.figures},
        "predicted_speedup": best.rate / alone,
        "measured_speedup": report["speedup"],
        "learned_from": {"tokens": len(found.room), "prompts": len(learnt)},
        "predicted_tau": best.tau,
        "measured_tau": report["tau"],
        "wins": report["speedup"] > 1,
        "measured": report,
    }


def _is_draft(file: Path) -> bool:
    try:
        read_shape(file)
    except UserError:
        return False
    return True


def answered(
    head: Head,
    target: Target,
    questions: Sequence[Question],
    settings: Settings,
    chat_template: str | None = None,
    bar: Progress | None = None,
) -> tuple[PackedBatch, list[int]]:
    """Return the target's own answers to first turns, packed with their features, and one of the texts."""
    layers, rows, text = head.config.layers_for(target.num_layers), [], [0]
    for _, conversation in conversations(target.tokenizer, list(questions), chat_template):
        prompt = conversation.ask(0)
        answer = plain(target, prompt, settings).ids
        text = [*prompt, *answer]
        with FeatureTap(target, layers) as tap:
            seen = tap.forward(torch.tensor([text], device=target.device))
        labels = seen.last[0, len(prompt) - 1 : -1]
        logits = target.logits(labels).float()
        aux = None if seen.aux is None else seen.aux[0].float()
        span = [(len(prompt), len(text) - 1)]
        ids, last = torch.tensor(text), seen.last[0].float()
        best, lse = logits.argmax(-1).cpu(), logits.logsumexp(-1).cpu()
        if bar is not None:
            bar.advance(1, "plain answers")
        rows.append(ShardRow(ids, span, aux, last, labels.float(), best, lse))
    return pack(rows, head.config.kind).to(target.device), text


def _in_fp32(head: Head, target: Target) -> Head:
    return copy.deepcopy(head).to(device=target.device, dtype=torch.float32).eval()


def candidates(
    found: Tables, machine: Machine, greedy: bool, trees: Sequence[TreeTables] = ()
) -> Iterator[Candidate]:
    """Yield chains, chains that stop, static trees of the likeliest paths, and dynamic trees by `trees`."""
    for gamma in range(1, DEPTH + 1):
        for stop in _STOPS:
            expected = replay_chain(found, gamma, greedy, stop)
            seconds = sum(
                share * machine.round(guesses + 1, [1] * max(guesses - 1, 0), min(expected.tau, guesses + 1))
                for guesses, share in enumerate(made / expected.rounds for made in expected.made)
            )
            yield Candidate(Chain(gamma, stop), expected.tau, seconds)
    rates = rank_rates(found)
    for budget in _BUDGETS:
        for depth in range(1, DEPTH + 1):
            paths = best_paths(rates[:depth], budget)
            tau = replay_paths(found.ranks, found.room, paths).tau
            levels = [len(expanded) for _, _, _, expanded in StaticShape.from_paths(paths).levels if expanded]
            yield Candidate(Static(paths), tau, machine.round(len(paths) + 1, levels, tau))
    for grown in trees:
        yield from _dynamic_candidates(grown, machine)


def _dynamic_candidates(grown: TreeTables, machine: Machine) -> Iterator[Candidate]:
    for (guesses, depth), steps in grown.steps.items():
        if guesses > grown.most_guesses(depth):
            continue
        tau, whole = replay_tree(grown, guesses, depth).tau, int(steps)
        fewer, more = (
            machine.round(guesses + 1, [grown.top_k] * number, tau) for number in (whole, whole + 1)
        )
        seconds = fewer + (more - fewer) * (steps - whole)
        yield Candidate(Dynamic(guesses + 1, grown.top_k, depth), tau, seconds)


def _ranked(offered: Iterable[Candidate]) -> list[Candidate]:
    """Return the candidates, the fastest first; of those that promise the same only the one offered first."""
    distinct = {(one.tau, one.seconds): one for one in reversed(list(offered))}
    return sorted(distinct.values(), key=lambda one: -one.rate)


def rank_rates(found: Tables) -> list[list[float]]:
    """Return how often the text's token had each rank at each step, over rows whose earlier guesses count."""
    room = torch.tensor(found.room)
    rates = []
    for step, ranks in enumerate(found.ranks.cpu()):
        here = ranks[room > step]
        rates.append([float((here == rank).sum() / max(1, len(here))) for rank in range(RANKS)])
    return rates


def _figures(one: Candidate, alone: float) -> dict[str, Any]:
    return {
        "draft": draft_name(one.shape.figures),
        "tau": one.tau,
        "milliseconds": 1e3 * one.seconds,
        "speedup": one.rate / alone,
    }


def too_few(report: dict[str, Any]) -> str | None:
    """Return a line where acceptance was learned from too little to choose a draft by, else None."""
    tokens, prompts = report["learned_from"]["tokens"], report["learned_from"]["prompts"]
    if tokens >= ENOUGH_TOKENS and prompts >= ENOUGH_PROMPTS:
        return None
    return (
        f"acceptance was learned from {counted(tokens, 'token')} of {counted(prompts, 'prompt')}: too few to "
        f"choose by, wanted {ENOUGH_TOKENS} of {ENOUGH_PROMPTS} at least"
    )


def lines(report: dict[str, Any]) -> list[str]:
    """Return the report as lines of text."""
    machine = report["machine"]
    verify = ", ".join(f"{size}: {ms:g}" for size, ms in machine["verify_ms"].items())
    draft = ", ".join(f"{rows}: {ms:g}" for rows, ms in machine["draft_ms"].items())
    output = ", ".join(f"{rows}: {ms:g}" for rows, ms in machine["output_ms"].items())
    found = [
        f"{report['head']} on {report['target']}, temperature {report['temperature']:g}"
        f"{own_names(report)}, {report['dtype']}, {report['device']}, {counted(report['threads'], 'thread')}",
        f"  the target's forward, ms by tokens   {verify}",
        f"  the head's step, ms by rows          {draft}",
        f"  the target's output map, ms by rows  {output}",
        f"  besides, ms a round                  reading {machine['observe_ms']:g}, other "
        f"{machine['overhead_ms']:g}",
        "predicted, the best five:",
    ]
    for one in report["candidates"][:5]:
        found.append(
            f"  {one['draft']}: tau {one['tau']:.2f}, {one['milliseconds']:.0f} ms a round, "
            f"{one['speedup']:.2f} times plain decoding"
        )
    if few := too_few(report):
        found.append(few)
    best = "best: " if report["wins"] else "best: plain decoding; of the drafts the closest: "
    found.append(
        f"{best}{report['best']['draft']}; predicted {report['predicted_speedup']:.2f} times plain decoding "
        f"(tau {report['predicted_tau']:.2f}), measured {report['measured_speedup']:.2f} (tau "
        f"{report['measured_tau']:.2f})"
    )
    if not report["wins"]:
        found.append("speculation loses here: plain decoding is faster with this head on this machine")
    return found
