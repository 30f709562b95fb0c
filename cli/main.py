"""The ``eagle`` command: one line per command, and errors turned into exit codes.

Exit codes: 0 done; 1 a bug (with traceback), or a fault that eval, verify, the demo or a dry run found; 2 the
user must change something; 130 interrupted.
Command files import nothing heavy at their top, so that ``--help`` answers at once, without torch.
"""

from __future__ import annotations

import functools
import os
import signal
import sys
import traceback
import warnings
from collections.abc import Callable
from typing import Any, NoReturn

import typer

from eagle_train.errors import UserError
from eagle_train.launch import begin, leave_words

from . import (
    demo,
    eval,
    export,
    extract,
    generate,
    import_,
    inspect,
    plan,
    prepare,
    regenerate,
    report,
    shards,
    train,
    tune,
    verify,
)

app = typer.Typer(
    name="eagle",
    help="Train, score and export EAGLE draft heads: lossless speculative decoding of language models.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
)


class _InterruptedError(Exception):
    """An interruption of which something is known to be kept, or not."""


def _saying_what_is_kept(work: Callable[..., Any], kept: Callable[..., str]) -> Callable[..., Any]:
    """Return the command `work`; when it is interrupted, `kept` is asked what is there by then."""

    @functools.wraps(work)
    def run(**given: Any) -> Any:
        try:
            return work(**given)
        except KeyboardInterrupt as error:
            raise _InterruptedError(kept(**given)) from error

    return run


for _command in (
    prepare,
    regenerate,
    inspect,
    plan,
    extract,
    shards,
    train,
    report,
    eval,
    generate,
    verify,
    tune,
    export,
    import_,
    demo,
):
    _work = _saying_what_is_kept(_command.run, _command.kept) if hasattr(_command, "kept") else _command.run
    app.command(name=_command.NAME, help=_command.HELP, epilog=_command.EXAMPLES)(_work)

_USAGE_ERROR: type[Exception] = typer.BadParameter.__mro__[2]  # ClickException, wherever typer has it from


@app.callback(invoke_without_command=True)
def _top(version: bool = typer.Option(False, "--version", help="Print the version and stop.")) -> None:
    if version:
        from eagle_train.provenance import tool_version

        print(f"eagle {tool_version()}")
        raise typer.Exit


def main(arguments: list[str] | None = None) -> NoReturn:
    """Run one command and leave with its exit code."""
    os.environ.setdefault("HF_HUB_VERBOSITY", "error")  # what fails is said once, not at every retry
    signal.signal(signal.SIGTERM, _terminate)
    warnings.formatwarning = lambda message, *_, **__: f"warning: {message}\n"  # type: ignore[assignment]
    kept = ""
    try:
        try:
            begin()
            code = app(args=arguments, prog_name="eagle", standalone_mode=False)
        finally:  # the end is known: what interrupts it now would only be seen as a fault of it
            for number in (signal.SIGTERM, signal.SIGINT):
                signal.signal(number, _too_late)
    except UserError as error:
        code = _say(f"error: {error}", 2)
    except _InterruptedError as error:
        code, kept = 130, f"{error}, "
    except (typer.Abort, KeyboardInterrupt):
        code = 130
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = 0
    except _USAGE_ERROR as error:
        text = _usage(error)  # empty where help was shown because nothing was asked for
        code = _say(f"error: {text}", 2) if text else 2
    except Exception:
        code = 1
        if not leave_words(traceback.format_exc(), code):
            raise
    if code == 130:  # also where typer itself turned Ctrl-C into this code
        _say(f"interrupted; {kept}give the same command again", code)
    sys.exit(code if isinstance(code, int) else 0)


def _usage(error: Exception) -> str:
    """Return a mistyped command line's fault as one sentence with where to look."""
    context = getattr(error, "ctx", None)
    command = context.command_path if context is not None else "eagle"
    text = " ".join(error.format_message().split())  # type: ignore[attr-defined]
    return f"{command}: {text.rstrip('.')}; see {command} --help" if text else ""


def _terminate(signum: int, frame: object) -> NoReturn:
    """Treat SIGTERM like Ctrl-C: unwind, remove temporary files, keep finished work."""
    raise KeyboardInterrupt


def _too_late(signum: int, frame: object) -> None:
    """Let this process end as it is about to."""


def _say(text: str, code: int) -> int:
    """Say how this process ends; where one command started several, that one says it."""
    if not leave_words(text.removeprefix("error: "), code):
        print(text, file=sys.stderr)
    return code


if __name__ == "__main__":
    main()
