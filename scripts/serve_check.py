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
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from engine_env import ENGINE, engine_python

from eagle_train.decoding.drafters import Chain, HeadDrafter
from eagle_train.decoding.loop import Generation, Settings, generate, plain
from eagle_train.evaluation.questions import conversations, read_questions
from eagle_train.export.export import export
from eagle_train.heads.disk import load_head
from eagle_train.targets.builtin import small_target
from eagle_train.targets.load import Target, load_target

METHODS = {"eagle1": "eagle", "eagle3": "eagle3"}
HERE = Path(__file__).parent


def run_engine(python: Path, job: dict[str, Any]) -> list[dict[str, Any]]:
    """Decode a job's prompts in the engine; return its answers. See vllm_greedy.py."""
    with tempfile.TemporaryDirectory() as folder:
        files = [Path(folder) / name for name in ("job.json", "result.json")]
        files[0].write_text(json.dumps(job), encoding="utf-8")
        environment = {
            **os.environ,
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "VLLM_NO_USAGE_STATS": "1",
            "HF_HUB_OFFLINE": "1",
        }
        command = [str(python), str(HERE / "vllm_greedy.py"), *map(str, files)]
        log = Path(folder) / "log.txt"
        with log.open("w", encoding="utf-8") as stream:
            code = subprocess.run(command, env=environment, stdout=stream, stderr=stream).returncode
        if code:
            sys.exit(f"the engine failed:\n{log.read_text(encoding='utf-8')[-4000:]}")
        return json.loads(files[1].read_text(encoding="utf-8"))["answers"]


def our_counts(made: Generation, gamma: int) -> dict[str, Any]:
    """Return a chain's answer under the engine's names, guesses past the end of the text counted."""
    uncut = made.accepted_uncut
    return {
        "ids": made.ids,
        "drafts": len(uncut),
        "accepted": sum(uncut),
        "accepted_by_position": [sum(n > i for n in uncut) for i in range(gamma)],
    }


def compare(ours: list[dict[str, Any]], theirs: list[dict[str, Any]], what: str) -> list[str]:
    """Return one line for every prompt and figure that differs between our loop and the engine."""
    lines = []
    for number, (mine, engine) in enumerate(zip(ours, theirs, strict=True)):
        for key in ("ids", "drafts", "accepted", "accepted_by_position"):
            if key in mine and mine[key] != engine[key]:
                lines.append(f"{what}, prompt {number}: {key} {mine[key]}, in vLLM {engine[key]}")
    return lines


def figures(answers: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the pooled figures of one side."""
    drafts = sum(answer["drafts"] for answer in answers)
    by_position = [sum(column) for column in zip(*(a["accepted_by_position"] for a in answers), strict=True)]
    return {
        "tokens": sum(len(answer["ids"]) for answer in answers),
        "drafts": drafts,
        "acceptance_length": 1 + sum(answer["accepted"] for answer in answers) / drafts,
        "accepted_by_position": [count / drafts for count in by_position],
    }


def check_head(
    source: str, target: Target, prompts: list[list[int]], python: Path, settings: Settings, gamma: int
) -> dict[str, Any]:
    """Export one head, decode with it here and in the engine; return figures and differences."""
    with tempfile.TemporaryDirectory() as folder:
        made = export(source, Path(folder) / "head", engine="vllm", dtype="fp32", target=target.name)
        job = {**engine_job(target, prompts, settings), "head": f"{folder}/head", "gamma": gamma}
        theirs = run_engine(python, {**job, "method": METHODS[made["kind"]]})
        drafter = HeadDrafter(load_head(Path(folder) / "head"), target, Chain(gamma))
    ours = [our_counts(generate(target, drafter, prompt, settings), gamma) for prompt in prompts]
    config = drafter.head.config
    return {
        "head": source,
        "kind": config.kind,
        "draft_vocab_size": config.draft_vocab_size,
        "fc_norm": config.fc_norm,
        "norm_output": config.norm_output,
        "ours": figures(ours),
        "vllm": figures(theirs),
        "ids": [answer["ids"] for answer in theirs],
        "differences": compare(ours, theirs, source),
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
    parser.add_argument("--json", type=Path, help="write the figures here too")
    asked = parser.parse_args()

    python = engine_python(asked.engine_env.absolute())
    target = load_target(str(asked.target or small_target()), dtype="fp32", device="cpu")
    settings = Settings(max_new_tokens=asked.max_new_tokens)
    questions = read_questions(None, asked.prompts)
    prompts = [conversation.ask(0) for _, conversation in conversations(target.tokenizer, questions)]
    alone = [{"ids": plain(target, prompt, settings).ids} for prompt in prompts]
    differences = compare(alone, run_engine(python, engine_job(target, prompts, settings)), "no head")
    results = []
    for head in asked.heads:
        result = check_head(head, target, prompts, python, settings, asked.gamma)
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
        f"prompts, {result['vllm']['tokens']} tokens, chain of {gamma}, greedy, float32"
    ]
    for side in ("ours", "vllm"):
        found = result[side]
        shares = " ".join(f"{share:.4f}" for share in found["accepted_by_position"])
        lines.append(
            f"  {side:4} acceptance length {found['acceptance_length']:.4f} in {found['drafts']} rounds, "
            f"accepted by position {shares}"
        )
    lines.append(f"  differences: {len(result['differences'])}")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
