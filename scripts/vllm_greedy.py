"""Run inside the engine's own environment: decode prompts greedily in vLLM, write ids and counters.

    python vllm_greedy.py JOB.json RESULT.json

JOB holds `target`, `prompts` (lists of token ids), `max_new_tokens`, `eos_ids`, and for speculation `head`,
`method` and `gamma`. Prompts go one after the other, so that every prompt has counters of its own: RESULT
holds per prompt `ids`, `drafts`, `accepted` and `accepted_by_position`, the last three as vLLM counts them.
Imports nothing of eagle.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from vllm import LLM, SamplingParams


def counters(llm: LLM, gamma: int) -> list[int]:
    """Return drafts, accepted guesses, and accepted guesses by position, since the engine started."""
    found = {metric.name: metric for metric in llm.get_metrics()}
    names = ("vllm:spec_decode_num_drafts", "vllm:spec_decode_num_accepted_tokens")
    by_position = found.get("vllm:spec_decode_num_accepted_tokens_per_pos")
    return [
        *(int(found[name].value) if name in found else 0 for name in names),
        *(map(int, by_position.values) if by_position else [0] * gamma),
    ]


def main(job_file: str, result_file: str) -> None:
    """Decode the job's prompts and write what came out."""
    job: dict[str, Any] = json.loads(Path(job_file).read_text(encoding="utf-8"))
    gamma = job.get("gamma", 0)
    speculative = None
    if job.get("head"):
        speculative = {"method": job["method"], "model": job["head"], "num_speculative_tokens": gamma}
    longest = max(map(len, job["prompts"])) + job["max_new_tokens"] + gamma + 1
    llm = LLM(
        model=job["target"],
        dtype="float32",
        enforce_eager=True,
        disable_log_stats=False,
        enable_prefix_caching=False,
        max_model_len=longest,
        max_num_seqs=1,
        speculative_config=speculative,
    )
    settings = SamplingParams(
        temperature=0.0, max_tokens=job["max_new_tokens"], stop_token_ids=job["eos_ids"], detokenize=False
    )
    answers = []
    for prompt in job["prompts"]:
        before = counters(llm, gamma)
        (output,) = llm.generate([{"prompt_token_ids": prompt}], settings, use_tqdm=False)
        drafts, accepted, *by_position = (b - a for a, b in zip(before, counters(llm, gamma), strict=True))
        answers.append(
            {
                "ids": list(output.outputs[0].token_ids),
                "drafts": drafts,
                "accepted": accepted,
                "accepted_by_position": by_position,
            }
        )
    Path(result_file).write_text(json.dumps({"answers": answers}), encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
