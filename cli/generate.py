"""``eagle generate``: parse, then one call."""

from __future__ import annotations

import typer

NAME = "generate"
HELP = "Answer one prompt live, accepted guesses coloured."
EXAMPLES = """
**Examples**

    eagle generate run/ --target HuggingFaceTB/SmolLM2-135M-Instruct --prompt "Why is the sky blue?"

    eagle generate head/ --target ./my-model --prompt "Write a haiku." --draft chain --gamma 5

    echo "Name three rivers." | eagle generate run/ --target ./my-model --temperature 0.7 --top-p 0.9
"""


def run(
    head: str = typer.Argument(
        ..., metavar="HEAD", help="A run of eagle train (its best), a head directory or a hub id."
    ),
    target: str = typer.Option(..., "--target", help="The target: hub id, directory or .gguf file."),
    prompt: str | None = typer.Option(
        None, "--prompt", help="What to ask; default: read from standard input."
    ),
    draft: str | None = typer.Option(
        None,
        "--draft",
        help="chain, static or dynamic; default static for eagle1, dynamic for eagle3 heads; on a CPU "
        "a chain is faster.",
    ),
    gamma: int = typer.Option(3, "--gamma", max=256, help="Guesses of a chain."),
    tree_tokens: int = typer.Option(
        60, "--tree-tokens", max=4096, help="Nodes of a dynamic tree with its root."
    ),
    top_k: int = typer.Option(10, "--top-k", max=1024, help="Beams of a dynamic tree, and children of each."),
    depth: int = typer.Option(8, "--depth", max=256, help="Levels of guesses of a dynamic tree."),
    temperature: float = typer.Option(0.0, "--temperature", help="0 is greedy."),
    top_p: float = typer.Option(
        1.0, "--top-p", help="Sample from the smallest set with this much probability."
    ),
    top_k_sampling: int = typer.Option(
        0, "--top-k-sampling", help="Sample from so many best tokens; 0 is all."
    ),
    max_new_tokens: int = typer.Option(256, "--max-new-tokens", help="Tokens of the answer at most."),
    dtype: str = typer.Option("auto", "--dtype", help="fp32, bf16, fp16, or auto: the checkpoint's own."),
    chat_template: str | None = typer.Option(
        None, "--chat-template", help="A Jinja file, or vicuna, or llama-2; default the tokenizer's own."
    ),
    seed: int = typer.Option(0, "--seed", min=0, max=2**63 - 1, help="Seed of the draws when sampling."),
    trust_remote_code: bool = typer.Option(
        False, "--trust-remote-code", help="Run code that the target brings along."
    ),
) -> None:
    import shlex
    import sys

    from eagle_train.decoding.sampling import Sampling
    from eagle_train.evaluation.evaluate import parse_shape, refuse_idle_sizes
    from eagle_train.evaluation.live import answer_live
    from eagle_train.evaluation.report import warn_in_one_line

    warn_in_one_line()
    text = sys.stdin.read() if prompt is None else prompt
    sizes = {"gamma": gamma, "tree_tokens": tree_tokens, "top_k": top_k, "depth": depth}
    shape = None
    if draft is None:
        refuse_idle_sizes(sizes)
    else:
        shape = parse_shape(draft, **sizes)
    answer_live(
        head,
        target,
        text,
        shape,
        sampling=Sampling(temperature, top_k_sampling, top_p),
        max_new_tokens=max_new_tokens,
        dtype=dtype,
        chat_template=chat_template,
        seed=seed,
        trust_remote_code=trust_remote_code,
    )
    print(f"next: eagle eval {shlex.quote(head)} --target {shlex.quote(target)}")
