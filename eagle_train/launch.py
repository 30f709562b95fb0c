"""One command in several processes of this machine, through torchrun, and the one error that ends them.

Where one process fails the others fail of it, each in words of its own. So none of them speaks: each leaves
its last words in a file, and the command that started them says the earliest, which are the cause.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import IO, NoReturn

from eagle_train import distributed
from eagle_train.errors import UserError
from eagle_train.parent import end_with

_WORDS = "EAGLE_LAST_WORDS"  # the folder in which processes leave them
_STARTER = "EAGLE_STARTED_BY"  # the process that a launcher, or one of its processes, ends with
_ENDED = "ended.json"  # exit codes by rank, of those that ended before the launcher ended the others
_AT_WORK = ".lock"  # of a process that runs, held until it ends
_INTERRUPTED = 130
_KEPT = "nothing finished is lost, give the same command again"
_held: list[IO[str]] = []  # open as long as this process runs
# Seconds from a signal until torchrun kills: 30 by itself, too few for a large step and its checkpoint.
_GRACE = "TORCH_ELASTIC_SHUTDOWN_TIMEOUT"


def relaunch(processes: int, arguments: list[str]) -> None:
    """Run ``eagle ARGUMENTS`` in `processes` processes on this machine through torchrun.

    Returns when all of them ended well; an interruption ends them first. Raises the UserError of the process
    that failed first, or one that says how it ended where it could not speak; after a crash its traceback is
    printed and the exit code is 1. Raises UserError when already inside such a launch.
    """
    check_number(processes)
    environment = dict(os.environ)
    environment.setdefault("OMP_NUM_THREADS", str(max(1, distributed.num_cores() // processes)))
    environment.setdefault(_GRACE, "600")
    environment[distributed.RELAUNCHED] = str(processes)
    with tempfile.TemporaryDirectory(prefix="eagle-launch-") as folder:
        environment[_WORDS], environment[_STARTER] = folder, str(os.getpid())
        command = [sys.executable, "-m", "eagle_train.launch", str(processes), *arguments]
        child = subprocess.Popen(command, env=environment)
        try:
            code = child.wait()
        except KeyboardInterrupt:
            child.terminate()
            child.wait()
            raise
        if code < 0:
            _wait_for_processes(Path(folder))
            name = signal.Signals(-code).name
            raise UserError(
                f"the launcher of the {processes} processes was ended by {name}, and they with it; {_KEPT}"
            )
        if code != 0:
            _say_why(Path(folder), processes)


def check_number(processes: int) -> None:
    """Raise UserError where `processes` is no number of them, or torchrun has started its own already."""
    if distributed.launched():
        raise UserError(f"--processes {processes}: given inside torchrun; use one of the two")
    if processes < 1:
        raise UserError(f"--processes {processes}: wanted 1 or more")


def begin() -> None:
    """In a process that `relaunch` started, and before its work: let it end with its launcher."""
    starter = os.environ.pop(_STARTER, None)  # not for processes that this one starts
    if starter is None or distributed.relaunched() is None:
        return
    end_with(int(starter))
    with contextlib.suppress(ImportError, OSError):  # no such locks here
        import fcntl

        file = open(Path(os.environ[_WORDS], f"{distributed.rank()}{_AT_WORK}"), "w")  # noqa: SIM115
        fcntl.lockf(file, fcntl.LOCK_EX)
        _held.append(file)


def _wait_for_processes(folder: Path) -> None:
    """Return when no process is left that has its launcher's end to save for."""
    with contextlib.suppress(ImportError):
        import fcntl

        for name in folder.glob(f"*{_AT_WORK}"):
            with name.open("w") as file, contextlib.suppress(OSError):
                fcntl.lockf(file, fcntl.LOCK_EX)


def leave_words(text: str, code: int) -> bool:
    """Leave the error that ends this process with `code` to who started it; False where nobody did so."""
    folder = os.environ.get(_WORDS)
    if folder is None or not Path(folder).is_dir() or distributed.relaunched() is None:
        return False
    words = {"time": time.time(), "text": text, "code": code}
    file = Path(folder, f"{distributed.rank()}.json")
    file.with_suffix(".tmp").write_text(json.dumps(words))
    file.with_suffix(".tmp").replace(file)
    return True


def _say_why(folder: Path, processes: int) -> NoReturn:
    said = {int(file.stem): json.loads(file.read_text()) for file in folder.glob("[0-9]*.json")}
    codes: dict[str, int] = json.loads((folder / _ENDED).read_text()) if (folder / _ENDED).exists() else {}
    killed = {int(rank): code for rank, code in codes.items() if code < 0 and int(rank) not in said}
    if said and set(killed.values()) <= {-signal.SIGABRT, -signal.SIGTERM}:  # libraries' and torchrun's ends
        killed = {}  # of processes whose peer is gone
    if killed:
        rank, code = min(killed.items(), key=lambda one: (one[1] == -signal.SIGTERM, one))
        name = signal.Signals(-code).name
        why = "; memory may have run out" if code == -signal.SIGKILL else ""
        raise UserError(f"process {rank} of {processes} was ended by {name}{why}; {_KEPT}")
    if not said:
        ended = ", ".join(f"process {rank} with exit code {code}" for rank, code in codes.items())
        raise UserError(
            f"one of the {processes} processes failed ({ended or 'their launcher ended'}; its message, if "
            f"any, is above); {_KEPT}"
        )
    rank, first = min(said.items(), key=lambda one: one[1]["time"])
    if first["code"] == _INTERRUPTED:
        raise UserError(f"process {rank} of {processes} was interrupted; {_KEPT}")
    if first["code"] == 2:
        raise UserError(first["text"])
    print(f"process {rank} of {processes}:\n{first['text']}", end="", file=sys.stderr)
    sys.exit(first["code"])


def _run(processes: str, arguments: list[str]) -> int:
    """Be the launcher: start the processes, end them when one fails; return an exit code."""
    end_with(int(os.environ[_STARTER]))
    os.environ[_STARTER] = str(os.getpid())
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import parse_args, run

    # a process says why it ended; torch's loggers each have a level of their own
    logging.disable(logging.ERROR)
    words = ["--standalone", f"--nproc-per-node={processes}", "--no-python"]
    try:
        run(parse_args([*words, sys.executable, "-m", "eagle_cli.main", *arguments]))
    except ChildFailedError as error:
        codes = {rank: failure.exitcode for rank, failure in error.failures.items()}
        Path(os.environ[_WORDS], _ENDED).write_text(json.dumps(codes))
        return 1
    except (SignalException, KeyboardInterrupt):
        return _INTERRUPTED
    return 0


if __name__ == "__main__":
    sys.exit(_run(sys.argv[1], sys.argv[2:]))
