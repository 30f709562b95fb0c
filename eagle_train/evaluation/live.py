"""One answer shown while it is written, the accepted guesses coloured."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from eagle_train.data.templates import load_template
from eagle_train.decoding.law import own_law
from eagle_train.decoding.loop import Generation, Settings, generate
from eagle_train.decoding.sampling import Sampling
from eagle_train.decoding.shapes import Shape
from eagle_train.errors import UserError
from eagle_train.evaluation.heads import open_head
from eagle_train.evaluation.methods import head_drafter, usual_shape
from eagle_train.evaluation.questions import Conversation, Question
from eagle_train.evaluation.report import draft_name
from eagle_train.progress import counted
from eagle_train.targets.load import load_target

_ACCEPTED = "green"


def answer_live(
    head: str | Path,
    target: str,
    prompt: str,
    shape: Shape | None = None,
    *,
    sampling: Sampling | None = None,
    processors: bool = True,
    max_new_tokens: int = 256,
    dtype: str = "auto",
    chat_template: str | None = None,
    seed: int = 0,
    trust_remote_code: bool = False,
) -> Generation:
    """Answer `prompt` on standard output token by token; return the answer and its rounds.

    Guesses that stood are green on a terminal (the other tokens are the target's own). Raises UserError for
    an empty prompt and whatever else the user must change.
    """
    from rich.console import Console

    if not prompt.strip():
        raise UserError("prompt: got an empty text; give --prompt TEXT, or a text on standard input")
    model = load_target(target, dtype=dtype, trust_remote_code=trust_remote_code)
    loaded = open_head(head, model)
    sampling, shape = sampling or Sampling(), shape or usual_shape(loaded)
    sampling = own_law(model, sampling) if processors else sampling
    drafter = head_drafter(loaded, model, shape, sampling)
    template = load_template(model.tokenizer, chat_template)
    ids = Conversation(model.tokenizer, template, Question("prompt", "", (prompt,))).ask(0)
    console = Console(file=sys.stdout, highlight=False, soft_wrap=True)
    writer = _Writer(model.tokenizer, console)
    made = generate(
        model,
        drafter,
        ids,
        Settings(max_new_tokens=max_new_tokens, sampling=sampling, seed=seed),
        on_tokens=writer.write,
    )
    writer.finish()
    counts, seconds = made.counts, max(made.decode_seconds, 1e-9)
    end = "ended by itself" if made.ended else "cut by --max-new-tokens"
    console.print(
        f"{counted(counts.tokens, 'token')} in {counted(counts.rounds, 'round')} after the prefill's one: "
        f"acceptance length {counts.tau:.2f} "
        f"({draft_name(shape.figures)}), {counts.tokens / seconds:.1f} tokens/s after "
        f"{made.prefill_seconds:.2f} s of prefill; {end}",
        style="dim",
    )
    return made


class _Writer:
    """Writes tokens as text. A character may need several tokens: text is held back until it is whole.

    Tokens are decoded together with those before them on the same line and the one that ended the line
    before, since a token's text can depend on its neighbours.
    """

    def __init__(self, tokenizer: Any, console: Any) -> None:
        self._tokenizer, self._console = tokenizer, console
        self._ids: list[int] = []
        self._shown = ""

    def write(self, tokens: list[int], accepted: int) -> None:
        """Show one round's tokens, the first `accepted` of them in colour."""
        for i, token in enumerate(tokens):
            self._ids.append(token)
            text = self._tokenizer.decode(self._ids, skip_special_tokens=True)
            if not text.endswith("\ufffd"):
                self._show(text, _ACCEPTED if i < accepted else "")
        self._console.file.flush()

    def finish(self) -> None:
        """Show what was held back and end the line."""
        self._show(self._tokenizer.decode(self._ids, skip_special_tokens=True), "")
        self._console.print()

    def _show(self, text: str, style: str) -> None:
        from rich.text import Text

        self._console.print(Text(text[len(self._shown) :], style=style), end="")
        self._shown = text
        if text.endswith("\n"):  # a long answer is not decoded whole for every token of it
            self._ids = self._ids[-1:]
            self._shown = self._tokenizer.decode(self._ids, skip_special_tokens=True)
