"""Options that several commands share, and the drafts that they spell out together."""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from eagle_train.decoding.shapes import Shape

Head = Annotated[
    str, typer.Argument(metavar="HEAD", help="A run of eagle train (its best), a head directory or a hub id.")
]
Rows = Annotated[Path, typer.Argument(metavar="ROWS", help="The folder that eagle prepare made.")]
Target = Annotated[str, typer.Option("--target", help="The target: hub id, directory or .gguf file.")]
_QUESTIONS = (
    "mt_bench, gsm8k, humaneval, alpaca or cnn_dm from the hub, or a file of JSON lines such as "
    '{"question_id": 1, "category": "math", "turns": ["first turn", "second turn"]}, of which only turns '
    "must be there; default the built-in 60 held-out questions."
)
TUNED = 'a .json of eagle tune, such as {"draft": "chain", "gamma": 5}'  # as --draft takes it
Questions = Annotated[str | None, typer.Option("--questions", help=_QUESTIONS)]
ManyQuestions = Annotated[
    list[str] | None, typer.Option("--questions", help=f"{_QUESTIONS} Repeat it for a table.")
]
Gamma = Annotated[int | None, typer.Option("--gamma", max=256, help="Guesses of a chain; default 3.")]
TreeTokens = Annotated[
    int | None,
    typer.Option("--tree-tokens", max=1024, help="Nodes of a dynamic tree, its root counted; default 60."),
]
TopK = Annotated[
    int | None,
    typer.Option("--top-k", max=1024, help="Beams of a dynamic tree, and children of each; default 10."),
]
Depth = Annotated[
    int | None, typer.Option("--depth", max=256, help="Levels of guesses of a dynamic tree; default 8.")
]
Temperature = Annotated[float, typer.Option("--temperature", help="0 is greedy.")]
RepetitionPenalty = Annotated[
    float,
    typer.Option("--repetition-penalty", help="Logits of tokens in the text are divided by it; 1 is off."),
]
NoProcessors = Annotated[
    bool,
    typer.Option(
        "--no-processors",
        help="Leave out what the target's generation_config sets beside temperature, top-k and top-p, such "
        "as a repetition penalty.",
    ),
]
TopP = Annotated[
    float, typer.Option("--top-p", help="Sample from the smallest set with this much probability.")
]
TopKSampling = Annotated[
    int, typer.Option("--top-k-sampling", help="Sample from so many best tokens; 0 is all.")
]
Dtype = Annotated[
    str,
    typer.Option(
        "--dtype",
        help="The target's dtype: fp32, bf16, fp16; auto is bf16 for a half-precision checkpoint on hardware "
        "that computes in it, else fp32.",
    ),
]
ChatTemplate = Annotated[
    str | None,
    typer.Option(
        "--chat-template",
        help="A file with a Jinja template, or vicuna, or llama-2; default the tokenizer's own.",
    ),
]
TemplateArg = Annotated[
    list[str] | None,
    typer.Option(
        "--template-arg", help="NAME=VALUE for the chat template, such as enable_thinking=false; repeatable."
    ),
]
SkipBad = Annotated[
    bool, typer.Option("--skip-bad", help="Keep the good records of damaged files; the bad are named.")
]
Device = Annotated[
    str | None, typer.Option("--device", help="cpu, cuda or cuda:N; default a GPU where there is one.")
]
DeviceMap = Annotated[
    str | None,
    typer.Option(
        "--device-map",
        help="For a target larger than one GPU: spread it over all, for example auto; one process.",
    ),
]
LabelTopK = Annotated[
    int,
    typer.Option(
        "--label-top-k",
        min=0,
        help="Store so many likeliest tokens of each label in place of its state; eagle3 alone, 0 is off.",
    ),
]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace --out whatever it holds.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print the result as JSON.")]
Seed = Annotated[int, typer.Option("--seed", min=0, max=2**63 - 1, help="Seed of the draws when sampling.")]
TrustRemoteCode = Annotated[
    bool, typer.Option("--trust-remote-code", help="Run code that the target brings along.")
]


def typed(context: typer.Context, leaving: Collection[str] = ()) -> list[str]:
    """Return the command that was typed, without ``eagle``, but for the parameters named in `leaving`."""
    arguments, given = [str(context.command.name)], []
    for parameter in context.command.params:
        name = str(parameter.name)
        if name in leaving or not is_given(context, name):
            continue
        value = context.params[name]
        for item in value if isinstance(value, (list, tuple)) else [value]:
            if parameter.param_type_name == "argument":
                arguments.append(str(item))
            else:
                given += [parameter.opts[0]] if item is True else [parameter.opts[0], str(item)]
    return [*arguments, *given]


def is_given(context: typer.Context, name: str) -> bool:
    """Return whether a parameter was typed, its default too."""
    source = context.get_parameter_source(name)
    return source is not None and not source.name.startswith("DEFAULT")


def eval_command(head: str, target: str, draft: Sequence[str] = ()) -> str:
    """Return the ``eagle eval`` to type next, with the words of a `draft` already chosen.

    Without a GPU it asks few questions, and drafts a chain where none was chosen: a tree is slow there.
    """
    from eagle_train.targets.load import default_device

    words = ["eagle", "eval", head, "--target", target]
    if default_device().type == "cpu":
        return shlex.join([*words, *(draft or ("--draft", "chain")), "--num-questions", "10"])
    return shlex.join([*words, *draft])


def refuse_unread(context: typer.Context, unread: Collection[str], why: str) -> None:
    """Raise UserError, beginning with `why`, for the first parameter of `unread` that was typed."""
    from eagle_train.errors import UserError

    for parameter in context.command.params:
        if parameter.name in unread and is_given(context, parameter.name):
            option = parameter.opts[0]
            raise UserError(f"eagle {context.command.name}: {why}, so {option} has no meaning; leave it out")


def fail_on(fault: str | None) -> int:
    """Say a fault of the toolkit's own on stderr; return the exit code, 1 for a fault and 0 for none."""
    if fault is None:
        return 0
    print(f"error: {fault}", file=sys.stderr)
    return 1


def parse_layers(option: str, text: str | None) -> tuple[int, ...] | None:
    """Return the layer numbers of ``2,16,29``; raise UserError, naming `option`, for another text."""
    from eagle_train.errors import UserError

    if text is None:
        return None
    words = [word.strip() for word in text.split(",")]
    if not all(re.fullmatch("[0-9]{1,4}", word) for word in words):
        shown = text if len(text) <= 60 else f"{text[:60]}..."
        raise UserError(f"{option} {shown}: wanted numbers of layers, such as 2,16,29")
    return tuple(map(int, words))


def parse_size(option: str, text: str) -> int:
    """Return the bytes of ``200GB`` or ``1.5GiB``; raise UserError, naming `option`, for another text."""
    from eagle_train.errors import UserError

    found = re.fullmatch(r"([0-9]{1,9}(?:\.[0-9]{1,9})?) ?([KMGT]?)(i?)B", text, re.IGNORECASE)
    if found is None or (found[3] and not found[2]):
        raise UserError(f"{option} {text[:60]}: wanted a size, such as 200GB or 1.5GiB")
    base = 1024 if found[3] else 1000
    return int(float(found[1]) * base ** " KMGT".index(found[2].upper() or " "))


def draft_shapes(
    names: list[str], gamma: int | None, tree_tokens: int | None, top_k: int | None, depth: int | None
) -> list[Shape]:
    """Return the shapes that the command line names; a size not given is usual, a file is a tuned shape.

    Where none is named, sizes say which is meant. Raises UserError for an unknown name, and for a size of a
    draft that is not among those named.
    """
    from eagle_train.decoding.shapes import Chain, Dynamic, Sampled, Static, read_shape
    from eagle_train.errors import UserError, nearest

    makers = {"chain": Chain, "static": Static, "dynamic": Dynamic, "sampled": Sampled}
    sizes = {
        "chain": {"gamma": gamma},
        "static": {},
        "sampled": {},
        "dynamic": {"total_tokens": tree_tokens, "top_k": top_k, "depth": depth},
    }
    for name in names:
        if name not in makers and not name.endswith(".json"):
            known = ", ".join(makers)
            raise UserError(
                f"--draft {name}: wanted one of {known}, or a .json of eagle tune{nearest(name, makers)}"
            )
    given = {
        name: {key: value for key, value in of.items() if value is not None} for name, of in sizes.items()
    }
    sized = [name for name, values in given.items() if values]
    if not names and len(sized) == 1:
        names = sized
    for name, values in given.items():
        if values and name not in names:
            key, value = next(iter(values.items()))
            option = {"total_tokens": "tree-tokens"}.get(key, key).replace("_", "-")
            raise UserError(f"--{option} {value}: a size of a {name} draft; give --draft {name} with it")
    return [
        read_shape(name) if name.endswith(".json") else makers[name](**given[name])  # type: ignore[operator]
        for name in names
    ]
