"""The ``eagle`` command: one line per command, and errors turned into exit codes.

Exit codes: 0 done; 1 a bug (with traceback), or a fault that eval, verify, the demo or a dry run found; 2 the
user must change something; 130 interrupted.
Command files import nothing heavy at their top, so that ``--help`` answers at once, without torch.
"""

from __future__ import annotations

import os
import signal
import sys
import warnings
from typing import NoReturn

import typer

from eagle_train.errors import UserError

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
    app.command(name=_command.NAME, help=_command.HELP, epilog=_command.EXAMPLES)(_command.run)

_KEEPS = {
    "regenerate": "answers",
    "extract": "shards",
    "train": "steps",
    "demo": "stages",
}  # when interrupted
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
    try:
        code = app(args=arguments, prog_name="eagle", standalone_mode=False)
    except UserError as error:
        code = _say(f"error: {error}", 2)
    except (typer.Abort, KeyboardInterrupt):
        code = 130
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = 0
    except _USAGE_ERROR as error:
        text = _usage(error)  # empty where help was shown because nothing was asked for
        code = _say(f"error: {text}", 2) if text else 2
    if code == 130:  # also where typer itself turned Ctrl-C into this code
        named = (sys.argv[1:] if arguments is None else arguments)[:1]
        kept = _KEEPS.get(named[0] if named else "")
        _say(f"interrupted; {f'finished {kept} are kept, ' if kept else ''}give the same command again", 130)
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


def _say(text: str, code: int) -> int:
    print(text, file=sys.stderr)
    return code


if __name__ == "__main__":
    main()
