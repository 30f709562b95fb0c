"""Our exported heads in a real engine: vLLM on the CPU, float32, greedy, beside our own loop.

    python scripts/serve_check.py HEAD [HEAD ...] [--target T] [--engine-env .venv-vllm] [--json FIGURES]

HEAD is a run or a head directory; it is exported with `eagle export --engine vllm` first, and that export
is what both sides load. For every prompt (first turns of the built-in held-out questions) this checks
 - ids: vLLM with the head = vLLM alone = our plain decoding = our chain loop;
 - counters: vLLM's drafts, accepted guesses and accepted guesses by position = our loop's rounds and its
   accepted guesses, those past the end of the text counted, which vLLM counts too.
Exits 1 where anything differs, and says where. The engine's environment is built in --engine-env on the
first use (about 2 GB to fetch, 6 GB on disk) and kept. Part of a release's checks, not of `make test`.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from engine_env import ENGINE, engine_python, engine_server, engine_settings, install_vllm

from eagle_train.decoding.loop import Settings, generate, plain
from eagle_train.decoding.sampling import Sampling
from eagle_train.decoding.shapes import Chain
from eagle_train.evaluation.counters import Counters, add_up, loop_counters
from eagle_train.evaluation.methods import head_drafter
from eagle_train.evaluation.questions import conversations, read_questions
from eagle_train.evaluation.server import compare_with_server, server_lines
from eagle_train.export.export import export
from eagle_train.heads.foreign import read_any
from eagle_train.targets.builtin import small_target
from eagle_train.targets.load import Target, load_target

METHODS = {"eagle1": "eagle", "eagle3": "eagle3", "medusa": "medusa"}
HERE = Path(__file__).parent


def run_engine(python: Path, job: dict[str, Any]) -> list[dict[str, Any]]:
    """Decode a job's prompts in the engine; return its answers. See vllm_greedy.py."""
    with tempfile.TemporaryDirectory() as folder:
        files = [Path(folder) / name for name in ("job.json", "result.json")]
        files[0].write_text(json.dumps(job), encoding="utf-8")
        command = [str(python), str(HERE / "vllm_greedy.py"), *map(str, files)]
        log = Path(folder) / "log.txt"
        with log.open("w", encoding="utf-8") as stream:
            code = subprocess.run(command, env=engine_settings(), stdout=stream, stderr=stream).returncode
        if code:
            sys.exit(f"the engine failed:\n{log.read_text(encoding='utf-8')[-4000:]}")
        answers = json.loads(files[1].read_text(encoding="utf-8"))["answers"]
    return [
        side(one["ids"], Counters(one["drafts"], one["accepted"], tuple(one["accepted_by_position"])))
        for one in answers
    ]


def side(ids: list[int], counters: Counters) -> dict[str, Any]:
    """Return one answer of one side."""
    return {"ids": ids, "counters": counters}


def compare(ours: list[dict[str, Any]], theirs: list[dict[str, Any]], what: str) -> list[str]:
    """Return one line for every prompt whose ids or counters differ between our loop and the engine."""
    lines = []
    for number, (mine, engine) in enumerate(zip(ours, theirs, strict=True)):
        for key in ("ids", "counters"):
            if key in mine and mine[key] != engine[key]:
                lines.append(f"{what}, prompt {number}: {key} {mine[key]}, in vLLM {engine[key]}")
    return lines


def pooled(answers: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the figures of one side over all prompts, by vLLM's definitions."""
    return add_up([answer["counters"] for answer in answers]).figures


def check_head(
    source: str,
    target: Target,
    prompts: list[list[int]],
    python: Path,
    settings: Settings,
    gamma: int,
    layout: str,
    over_http: bool,
) -> dict[str, Any]:
    """Export one head, decode with it here and in the engine; return figures and differences.

    With `over_http` the engine's server is asked too, as ``eagle eval --against-server`` does.
    """
    with tempfile.TemporaryDirectory() as folder:
        named = target.name if layout == "vllm" else "owner/target"  # speculators name a hub id
        made = export(source, Path(folder) / "head", engine=layout, dtype="fp32", target=named)
        job = {**engine_job(target, prompts, settings), "head": f"{folder}/head", "gamma": gamma}
        method = METHODS[made["kind"]]
        theirs = run_engine(python, {**job, "method": method})
        reports = []
        if over_http:
            speculative: dict[str, object] = {"method": method, "model": f"{folder}/head"}
            speculative["num_speculative_tokens"] = gamma
            length = max(map(len, prompts)) + settings.max_new_tokens + gamma + 1
            with engine_server(python, target.name, speculative, length) as url:
                asked = read_questions(None, len(prompts))
                limit = settings.max_new_tokens
                reports.append(
                    compare_with_server(f"{folder}/head", target, url, asked, max_new_tokens=limit)
                )
            print("\n".join(server_lines(reports[0])), flush=True)
        head = read_any(Path(folder) / "head", num_target_layers=target.num_layers)
    ours, drafter = [], head_drafter(head, target, Chain(gamma), Sampling())
    for prompt in prompts:
        answer = generate(target, drafter, prompt, settings)
        ours.append(side(answer.ids, loop_counters(answer, gamma)))
    return {
        "head": source,
        "kind": made["kind"],
        "layout": layout,
        "draft_vocab_size": head.config.draft_vocab_size,
        "tokens": sum(len(answer["ids"]) for answer in theirs),
        "ours": pooled(ours),
        "vllm": pooled(theirs),
        "ids": [answer["ids"] for answer in theirs],
        "over_http": reports,
        "differences": compare(ours, theirs, source)
        + [f"{source} over HTTP: {found}" for report in reports for found in report["differences"]],
    }


def engine_job(target: Target, prompts: list[list[int]], settings: Settings) -> dict[str, Any]:
    """Return what the engine needs to know without a head."""
    return {
        "target": target.name,
        "prompts": prompts,
        "max_new_tokens": settings.max_new_tokens,
        "eos_ids": list(target.eos_ids),
    }


def main() -> int:
    """Check every head given; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("heads", nargs="+", metavar="HEAD")
    parser.add_argument("--target", help="default the built-in one")
    parser.add_argument("--engine-env", type=Path, default=Path(".venv-vllm"))
    parser.add_argument("--prompts", type=int, default=20)
    parser.add_argument("--gamma", type=int, default=3)
    parser.add_argument("--max-new-tokens", type=int, default=64)
    parser.add_argument("--layout", choices=("vllm", "speculators"), default="vllm")
    parser.add_argument("--over-http", action="store_true", help="ask the engine's server as well")
    parser.add_argument("--json", type=Path, help="write the figures here too")
    asked = parser.parse_args()

    python = engine_python(asked.engine_env.absolute(), ENGINE, install_vllm)
    target = load_target(str(asked.target or small_target()), dtype="fp32", device="cpu")
    settings = Settings(max_new_tokens=asked.max_new_tokens)
    questions = read_questions(None, asked.prompts)
    prompts = [conversation.ask(0) for _, conversation in conversations(target.tokenizer, questions)]
    alone = [{"ids": plain(target, prompt, settings).ids} for prompt in prompts]
    differences = compare(alone, run_engine(python, engine_job(target, prompts, settings)), "no head")
    results = []
    for head in asked.heads:
        result = check_head(
            head, target, prompts, python, settings, asked.gamma, asked.layout, asked.over_http
        )
        spoken = [{"ids": ids} for ids in result.pop("ids")]
        result["differences"] += compare(alone, spoken, f"{head} beside plain decoding")
        results.append(result)
        print(describe(result, len(prompts), asked.gamma), flush=True)
        differences += result["differences"]
    for line in differences:
        print(line)
    if asked.json:
        asked.json.write_text(json.dumps({"engine": ENGINE, "results": results}, indent=2), encoding="utf-8")
    return 1 if differences else 0


def describe(result: dict[str, Any], prompts: int, gamma: int) -> str:
    """Return one head's figures as lines."""
    lines = [
        f"{result['head']}: {result['kind']}, draft vocabulary {result['draft_vocab_size']:,}; {prompts} "
        f"prompts, {result['tokens']:,} tokens, chain of {gamma}, greedy, float32"
    ]
    for name in ("ours", "vllm"):
        found = result[name]
        shares = " ".join(f"{share:.4f}" for share in found["accepted_by_position"])
        lines.append(
            f"  {name:4} acceptance length {found['acceptance_length']:.4f} in {found['drafts']} rounds, "
            f"accepted by position {shares}"
        )
    lines.append(f"  differences: {len(result['differences'])}")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
