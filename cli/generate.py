"""``eagle generate``: parse, then one call."""

from __future__ import annotations

import typer

from . import options

NAME = "generate"
HELP = "Answer one prompt live, accepted guesses coloured."
EXAMPLES = """
**Examples**

    eagle generate run/ --target HuggingFaceTB/SmolLM2-135M-Instruct --prompt "Why is the sky blue?"

    eagle generate head/ --target ./my-model --prompt "Write a haiku." --draft chain --gamma 5

    echo "Name three rivers." | eagle generate run/ --target ./my-model --temperature 0.7 --top-p 0.9
"""

_SHAPE = ("draft", "gamma", "tree_tokens", "top_k", "depth")


def run(
    context: typer.Context,
    head: options.Head,
    target: options.Target,
    prompt: str | None = typer.Option(
        None, "--prompt", help="What to ask; default: read from standard input."
    ),
    draft: str | None = typer.Option(
        None,
        "--draft",
        help=f"chain, static, dynamic, sampled, or {options.TUNED}; default static for eagle1, medusa, "
        "dynamic for eagle3 heads; on a CPU a chain is faster.",
    ),
    gamma: options.Gamma = None,
    tree_tokens: options.TreeTokens = None,
    top_k: options.TopK = None,
    depth: options.Depth = None,
    temperature: options.Temperature = 0.0,
    top_p: options.TopP = 1.0,
    top_k_sampling: options.TopKSampling = 0,
    repetition_penalty: options.RepetitionPenalty = 1.0,
    no_processors: options.NoProcessors = False,
    max_new_tokens: int = typer.Option(256, "--max-new-tokens", help="Tokens of the answer at most."),
    dtype: options.Dtype = "auto",
    chat_template: options.ChatTemplate = None,
    seed: options.Seed = 0,
    trust_remote_code: options.TrustRemoteCode = False,
) -> None:
    import sys

    from eagle_train.decoding.sampling import Sampling
    from eagle_train.evaluation.live import answer_live

    text = sys.stdin.read() if prompt is None else prompt
    shapes = options.draft_shapes([draft] if draft else [], gamma, tree_tokens, top_k, depth)
    answer_live(
        head,
        target,
        text,
        shapes[0] if shapes else None,
        sampling=Sampling(temperature, top_k_sampling, top_p, repetition_penalty),
        processors=not no_processors,
        max_new_tokens=max_new_tokens,
        dtype=dtype,
        chat_template=chat_template,
        seed=seed,
        trust_remote_code=trust_remote_code,
    )
    chosen = options.typed(context, leaving=[name for name in context.params if name not in _SHAPE])
    print(f"next: {options.eval_command(head, target, chosen[1:])}")
