"""The same figures as lines for people."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from eagle_train.progress import counted

NEAR_TIE = 1e-3  # two logits closer than this may change places with the order of summation in fp32


def fault(report: dict[str, Any]) -> str | None:
    """Return a sentence where fp32 greedy answers differ beyond what rounding explains, else None."""
    gaps = [difference["gap"] for result in report["results"] for difference in result["differences"]]
    found = [gap for gap in gaps if report["dtype"] == "fp32" and gap >= NEAR_TIE]
    if not found:
        return None
    return (
        f"greedy answers differ from plain decoding in fp32 at {counted(len(found), 'place')} where the "
        f"best two logits "
        f"are {NEAR_TIE:g} or more apart; this is a fault in the toolkit: please report it"
    )


def draft_name(tree: dict[str, Any]) -> str:
    """Name a draft's shape, e.g. ``dynamic tree of 60 (top-k 10, depth 8)``."""
    if tree["draft"] == "chain":
        stop = f" that stops below {tree['stop']:.2g}" if "stop" in tree else ""
        return f"chain of {tree['depth']}{stop}"
    if tree["draft"] == "prompt-lookup":
        return f"up to {tree['depth']} tokens after the last {tree['longest']}"
    if tree["draft"] == "lookahead":
        return f"window {tree['window']}, level {tree['level']}, {tree['guesses']} guesses"
    beams = f"top-k {tree['top_k']}, " if "top_k" in tree else ""
    return f"{tree['draft']} tree of {tree['nodes']} nodes ({beams}depth {tree['depth']})"


def way_name(result: dict[str, Any], sources: dict[str, str] | None = None) -> str:
    """Name a way of decoding: its method, as ``--method`` takes it, and its draft's shape.

    `sources` are other names for the sources, such as those of `short_sources`.
    """
    source = result.get("source")
    named = f"={(sources or {}).get(source, source)}" if source else ""
    return f"{result['method']}{named}, {draft_name(result['tree'])}"


def short_sources(results: Sequence[dict[str, Any]]) -> dict[str, str]:
    """Return a name for every source: as many of its last folders as tell them all apart."""
    sources = sorted({str(result["source"]) for result in results if result.get("source")})
    for depth in range(1, 1 + max((len(Path(source).parts) for source in sources), default=0)):
        tails = ["/".join(Path(source).parts[-depth:]) for source in sources]
        if len(set(tails)) == len(sources):
            return dict(zip(sources, tails, strict=True))
    return {source: source for source in sources}


def head_name(report: dict[str, Any]) -> str:
    """Name the head of a report, such as ``eagle3 head run/ (best, step 30)``."""
    which = f" ({report['checkpoint']})" if report.get("checkpoint") else ""
    return f"{report['kind']} head {report['head']}{which}"


def own_names(report: dict[str, Any]) -> str:
    """Name the target's own processors of logits that were applied, if there are any."""
    return f", the target's own {', '.join(report['processors'])}" if report.get("processors") else ""


def lines(report: dict[str, Any]) -> list[str]:
    """Return the report of `evaluate` as lines of text."""
    greedy = report["temperature"] == 0
    how = "greedy" if greedy else f"temperature {report['temperature']:g}"
    if not greedy:
        how += f", top-k {report['top_k']}" if report["top_k"] else ""
        how += f", top-p {report['top_p']:g}" if report["top_p"] < 1 else ""
        how += ", blocks" if report["block"] else ""
    if report["repetition_penalty"] != 1:
        how += f", repetition penalty {report['repetition_penalty']:g}"
    how += own_names(report)
    who = f"{head_name(report)} on " if report["head"] else ""
    where = f" of {report['set']}" if report.get("set") else ""
    at_once = f", {report['batch']} prompts at once" if report["batch"] > 1 else ""
    found = [
        f"{who}{report['target']}: {counted(report['prompts'], 'prompt')}{where}, up to "
        f"{counted(report['max_new_tokens'], 'new token')}, {how}, {report['dtype']}, {report['device']}",
        f"plain decoding{at_once}: {report['plain']['tokens_per_second']:.1f} tokens/s",
    ]
    for result in report["results"]:
        found += ["", *_result_lines(result)]
    return found


def _result_lines(result: dict[str, Any]) -> list[str]:
    found = [
        way_name(result),
        f"  acceptance length (tau)   {result['tau']:.3f}   ({counted(result['tokens'], 'token')} in "
        f"{counted(result['rounds'], 'round')}; as vLLM counts: {result['vllm_acceptance_length']:.3f}, "
        f"as SGLang: {result['sglang_acceptance_length']:.3f})",
        f"  accepted by position      {_shares(result['accepted_by_position'])}",
        f"  given the previous        {_shares(result['accepted_given_previous'])}",
        f"  rounds by accepted count  {' '.join(map(str, result['accepted_histogram']))}",
        f"  tokens per second         {result['tokens_per_second']:.1f}, {result['speedup']:.2f} times plain "
        f"decoding ({result['speedup_with_prefill']:.2f} with the prefill)",
        f"  a round takes             {result['round_cost']:.2f} times as long as a plain token"
        + ("" if result["speedup"] >= 1 else f", more than the {result['tau']:.2f} tokens it gives"),
        f"  output                    {output_words(result)}",
    ]
    return found + _tau_by(result)


def output_words(result: dict[str, Any]) -> str:
    """Say whether the output was plain decoding's own."""
    if result["lossless"] is None:
        return "sampled: the target's law is kept by the rule of verification"
    if result["lossless"]:
        return "equal to plain decoding on every prompt"
    first = result["differences"][0]
    where = counted(len(result["differences"]), "prompt")
    return (
        f"differs from plain decoding on {where}; first: {first['question']}, turn {first['turn']}, token "
        f"{first['at']}, where the two best logits are {first['gap']:.2g} apart"
    )


def _shares(values: list[float]) -> str:
    return " ".join(f"{value:.3f}" for value in values)


def predicted_lines(report: dict[str, Any]) -> list[str]:
    """Return the report of `predict` as lines of text."""
    warm = f" at temperature {report['temperature']:g}" if report["temperature"] else ""
    found = [
        f"{head_name(report)}, {draft_name(report['tree'])}{warm}, predicted without "
        f"decoding on {report['texts']} ({counted(report['rows'], 'row')}: {report['which_rows']}; features "
        f"{report['codec']})",
        f"  acceptance length (tau)   {report['tau']:.3f}   ({report['tokens']:,} tokens in "
        f"{report['rounds']:,.10g} round{'' if report['rounds'] == 1 else 's'}"
        f"{'' if 'accepted_histogram' in report else ', as expected'})",
    ]
    if not report["temperature"]:
        found.append("  exact for answers that the target wrote greedily; for others an indication only")
    if own := report["processors"]:
        words = f"the target's own {', '.join(own)}"
        found.append(f"  provided that the answers were written with {words}, as eval and regenerate do")
    if "accepted_histogram" in report:
        found += [
            f"  accepted by position      {_shares(report['accepted_by_position'])}",
            f"  given the previous        {_shares(report['accepted_given_previous'])}",
            f"  rounds by accepted count  {' '.join(map(str, report['accepted_histogram']))}",
        ]
    return found + _tau_by(report)


def _tau_by(figures: dict[str, Any]) -> list[str]:
    """Return lines of acceptance lengths by class, those that there are."""
    found = []
    for key, words in (("category", "category"), ("place", "place in the answer"), ("context", "context")):
        if taus := figures.get(f"tau_by_{key}"):
            listed = ", ".join(f"{name} {tau:.2f}" for name, tau in taus.items())
            found.append(f"  {f'tau by {words}':24}  {listed}")
    return found
