"""Several processes of one command: what ends them is said once, and nothing of the launcher's own."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from eagle_cli.main import main
from eagle_train import launch
from eagle_train.errors import UserError

_SAID = "T: no such directory; give another"
_TRACEBACK = "Traceback (most recent call last):\nKeyError: 'weight'\n"
# process 1 fails as it is told; process 0 waits for it in vain, and says so once it is ended
_WORKER = f"""
import os, signal, sys, time
from eagle_train.launch import leave_words

def ended(number, frame):
    leave_words("interrupted", 130)
    sys.exit(130)

signal.signal(signal.SIGTERM, ended)
if os.environ["RANK"] == "0":
    time.sleep(600)
if sys.argv[1] == "killed":
    os.kill(os.getpid(), signal.SIGKILL)
text, code = {{"said": ({_SAID!r}, 2), "crashed": ({_TRACEBACK!r}, 1)}}[sys.argv[1]]
leave_words(text, code)
sys.exit(code)
"""


@pytest.mark.parametrize(
    ("how", "raised", "printed"),
    [
        ("said", _SAID, ""),
        ("crashed", "1", f"process 1 of 2:\n{_TRACEBACK}"),
        (
            "killed",
            "process 1 of 2 was ended by SIGKILL; memory may have run out; nothing finished is lost, give "
            "the same command again",
            "",
        ),
    ],
)
def test_the_cause_is_said_and_nothing_else(
    how: str,
    raised: str,
    printed: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "eagle_cli").mkdir()
    (tmp_path / "eagle_cli" / "__init__.py").touch()
    (tmp_path / "eagle_cli" / "main.py").write_text(_WORKER)
    monkeypatch.chdir(tmp_path)
    with pytest.raises((UserError, SystemExit)) as caught:
        launch.relaunch(2, [how])
    assert str(caught.value) == raised
    assert capfd.readouterr() == ("", printed)


def _left(folder: Path, words: dict[int, tuple[float, str, int]], codes: dict[int, int]) -> Path:
    for rank, (moment, text, code) in words.items():
        (folder / f"{rank}.json").write_text(json.dumps({"time": moment, "text": text, "code": code}))
    (folder / "ended.json").write_text(json.dumps(codes))
    return folder


@pytest.mark.parametrize(
    ("words", "codes", "wanted"),
    [
        ({0: (2.0, "a peer is gone", 2), 1: (1.0, "the cause", 2)}, {0: 2, 1: 2}, "the cause"),
        ({1: (1.0, "the cause", 2)}, {0: -signal.SIGABRT, 1: 2}, "the cause"),  # a library's end without it
        ({1: (1.0, "the cause", 2)}, {0: -signal.SIGTERM, 1: 2}, "the cause"),  # torchrun ends the others
        ({}, {0: -signal.SIGTERM, 1: -signal.SIGKILL}, "process 1 of 2 was ended by SIGKILL; memory may"),
        ({0: (1.0, "a peer is gone", 2)}, {1: -signal.SIGSEGV}, "process 1 of 2 was ended by SIGSEGV; no"),
        ({}, {0: -signal.SIGABRT}, "process 0 of 2 was ended by SIGABRT; nothing"),
        ({1: (1.0, "interrupted", 130)}, {1: 130}, "process 1 of 2 was interrupted; nothing"),
        ({}, {1: 7}, "one of the 2 processes failed (process 1 with exit code 7; its message, if any, is ab"),
    ],
)
def test_the_earliest_words_are_the_cause_unless_a_process_was_killed(
    words: dict[int, tuple[float, str, int]], codes: dict[int, int], wanted: str, tmp_path: Path
) -> None:
    with pytest.raises(UserError) as caught:
        launch._say_why(_left(tmp_path, words, codes), 2)
    assert str(caught.value).startswith(wanted)


@pytest.mark.parametrize(
    ("error", "code", "text"),
    [
        (UserError("T: not there"), 2, "T: not there"),
        (KeyError("weight"), 1, "Traceback (most recent call last):"),
        (KeyboardInterrupt(), 130, "interrupted; "),
    ],
)
def test_a_process_that_one_command_started_leaves_its_error_to_it(
    error: BaseException,
    code: int,
    text: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def fail(*given: object, **settings: object) -> None:
        raise error

    monkeypatch.setattr("eagle_train.export.export.export", fail)
    for name, value in {"RANK": "1", "WORLD_SIZE": "2", "EAGLE_RELAUNCHED": "2"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("EAGLE_LAST_WORDS", str(tmp_path))
    with pytest.raises(SystemExit) as left:
        main(["export", "run", "--engine", "vllm", "--out", "head"])
    assert left.value.code == code
    words = json.loads((tmp_path / "1.json").read_text())
    assert words["text"].startswith(text)
    assert words["code"] == code
    assert "Traceback" not in capsys.readouterr().err


_SAVES_WHEN_ENDED = """
import os, signal, sys, time
from pathlib import Path
from eagle_train import launch

rank = os.environ["RANK"]

def ended(number, frame):
    time.sleep(0.5)
    Path(f"{rank}.saved").touch()
    sys.exit(130)

signal.signal(signal.SIGTERM, ended)
launch.begin()
Path(f"{rank}.new").write_text(f"{os.getpid()} {os.getppid()}")
os.rename(f"{rank}.new", f"{rank}.begun")
time.sleep(600)
"""


def _until(there: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 120
    while not there():
        assert time.monotonic() < deadline, "two minutes"
        time.sleep(0.05)


@pytest.mark.parametrize("killed", ["launcher", "starter"])
def test_processes_end_with_what_started_them_and_save(killed: str, tmp_path: Path) -> None:
    (tmp_path / "eagle_cli").mkdir()
    (tmp_path / "eagle_cli" / "__init__.py").touch()
    (tmp_path / "eagle_cli" / "main.py").write_text(_SAVES_WHEN_ENDED)
    begun, saved = ([tmp_path / f"{rank}.{name}" for rank in (0, 1)] for name in ("begun", "saved"))
    words = [sys.executable, "-c", "from eagle_train import launch; launch.relaunch(2, [])"]
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    starter = subprocess.Popen(words, cwd=tmp_path, stderr=subprocess.PIPE, text=True, env=environment)
    try:
        _until(lambda: all(file.exists() for file in begun))
        launcher = int(begun[0].read_text().split()[1])
        os.kill(launcher if killed == "launcher" else starter.pid, signal.SIGKILL)
        if killed == "launcher":  # it waits for them
            assert "the launcher of the 2 processes was ended by SIGKILL" in starter.communicate()[1]
            assert all(file.exists() for file in saved)
        _until(lambda: all(file.exists() for file in saved))
    finally:
        for file in (file for file in begun if file.exists()):
            for number in map(int, file.read_text().split()):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(number, signal.SIGKILL)
        starter.kill()
        starter.wait()


def test_an_interrupted_launch_says_nothing_of_its_own(tmp_path: Path) -> None:
    (tmp_path / "eagle_cli").mkdir()
    (tmp_path / "eagle_cli" / "__init__.py").touch()
    (tmp_path / "eagle_cli" / "main.py").write_text(_SAVES_WHEN_ENDED)
    code = "from eagle_train import launch\ntry: launch.relaunch(2, [])\nexcept KeyboardInterrupt: pass"
    words = [sys.executable, "-c", code]
    starter = subprocess.Popen(words, cwd=tmp_path, stderr=subprocess.PIPE, text=True)
    _until(lambda: all((tmp_path / f"{rank}.begun").exists() for rank in (0, 1)))
    starter.send_signal(signal.SIGINT)
    assert starter.communicate(timeout=120)[1] == ""
    assert all((tmp_path / f"{rank}.saved").exists() for rank in (0, 1))


def test_a_signal_to_a_process_that_is_ending_leaves_no_words() -> None:
    code = """
import atexit, os, signal
from eagle_cli.main import main
for number in (signal.SIGTERM, signal.SIGINT):
    atexit.register(os.kill, os.getpid(), number)
main(["inspect", "none"])
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1, done.stderr
