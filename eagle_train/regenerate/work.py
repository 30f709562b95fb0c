"""Answers as they come, in a folder beside the output that only ever grows.

Each worker appends to a file of its own, one line an answer, so a killed run loses at most the line that
was being written; the next run cuts it off and goes on. Answers are found by row id and turn.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

from eagle_train.errors import UserError
from eagle_train.io.paths import make_folder, os_error
from eagle_train.io.text import read_json, write_json
from eagle_train.regenerate.answers import Answer, Asked

_SETTINGS = "settings.json"

Key = tuple[str, int]  # row id, turn


class Work:
    """The answers of one output so far. Use through `open_work`."""

    def __init__(self, folder: Path, part: BinaryIO, lock: BinaryIO) -> None:
        self.folder, self._lock = folder, lock
        self.failed: dict[Key, str] = {}
        self._part = part
        self._answers: dict[Key, tuple[Path, int]] = {}
        self._read: dict[Path, BinaryIO] = {}
        self.look()

    def look(self) -> None:
        """Read anew what all workers have written; a half-written last line is not there yet."""
        self._answers, self.failed = {}, {}
        for path in sorted(self.folder.glob("part-*.jsonl")):
            with open(path, "rb") as handle:
                start = 0
                for number, line in enumerate(handle, 1):
                    if line.endswith(b"\n"):
                        self._index(path, start, line, f"{path}:{number}")
                    start += len(line)

    def _index(self, path: Path, start: int, line: bytes, place: str) -> None:
        with reading(place, f"remove the line or {self.folder}"):
            entry = json.loads(line)
            key, reason = (entry["row_id"], entry["turn"]), entry.get("failed")
            if [type(part) for part in key] != [str, int] or not isinstance(reason, (str, type(None))):
                raise ValueError("row_id, turn or failed is of another kind")
            if reason is None:
                Answer.of_record(entry["answer"])
        if reason is None:
            self._answers[key] = (path, start)
            self.failed.pop(key, None)
        elif key not in self._answers:
            self.failed[key] = reason

    def get(self, key: Key) -> Answer | None:
        """Return an answer, None where it is still to be made."""
        if key not in self._answers:
            return None
        path, start = self._answers[key]
        if path not in self._read:
            self._read[path] = open(path, "rb")  # noqa: SIM115  # closed with this object
        self._read[path].seek(start)
        return Answer.of_record(json.loads(self._read[path].readline())["answer"])

    def answers(self, asked: Asked) -> list[Answer]:
        """Return the answers of a conversation from its first turn on, up to the first that is missing."""
        found: list[Answer] = []
        while len(found) < asked.num_turns:
            answer = self.get((asked.row_id, len(found)))
            if answer is None:
                break
            found.append(answer)
        return found

    def wanted(self, asked: Asked, answers: list[Answer]) -> bool:
        """True when the conversation, answered so far by `answers`, goes on with another answer."""
        return len(answers) < asked.num_turns and not (answers and answers[-1].is_empty)

    def put(self, key: Key, answer: Answer) -> None:
        """Keep an answer."""
        self._answers[key] = (Path(self._part.name), self._append(key, {"answer": answer.record()}))
        self.failed.pop(key, None)

    def fail(self, key: Key, reason: str) -> None:
        """Note that an answer could not be made; the next run tries again."""
        self._append(key, {"failed": reason})
        self.failed[key] = reason

    def _append(self, key: Key, fields: dict[str, Any]) -> int:
        line = json.dumps({"row_id": key[0], "turn": key[1], **fields}, ensure_ascii=False) + "\n"
        start = self._part.seek(0, 2)
        try:
            self._part.write(line.encode("utf-8", "replace"))
            self._part.flush()
        except OSError as error:
            raise os_error(self._part.name, error) from error
        return start

    @contextlib.contextmanager
    def alone(self) -> Iterator[None]:
        """Keep other workers out of this block, and look at what they have written before."""
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        try:
            self.look()
            yield
        finally:
            fcntl.flock(self._lock, fcntl.LOCK_UN)

    def close(self) -> None:
        """Close all files."""
        for handle in (self._part, *self._read.values()):
            with contextlib.suppress(OSError):
                handle.close()

    def remove(self) -> None:
        """Take the folder away once the output holds everything."""
        shutil.rmtree(self.folder, ignore_errors=True)


def folder_of(out: Path) -> Path:
    """Return where the work for an output lies."""
    return out.with_name(out.name + ".work")


@contextlib.contextmanager
def open_work(out: Path, identity: dict[str, Any], worker: int) -> Iterator[Work]:
    """Open the folder beside `out` for one worker.

    Raises UserError when it holds answers made otherwise, or when another run is at work.
    """
    folder = make_folder(folder_of(out))
    settings = folder / _SETTINGS
    if not settings.exists():
        write_json(settings, identity)
    with reading(settings, f"remove {folder}"):
        there = read_json(settings, f"remove {folder}")
    refuse_other(settings, there, identity)
    path = folder / f"part-{worker:05}.jsonl"
    try:
        with open(path, "ab") as part, open(settings, "rb") as lock:
            fcntl.flock(part, fcntl.LOCK_EX | fcntl.LOCK_NB)
            _cut_half_line(path)
            work = Work(folder, part, lock)
            try:
                yield work
            finally:
                work.close()
    except BlockingIOError as error:
        raise UserError(
            f"{path}: another run is writing there; wait for it, or give another --out"
        ) from error
    except OSError as error:
        raise os_error(path, error) from error


@contextlib.contextmanager
def reading(place: Path | str, advice: str) -> Iterator[None]:
    """Turn whatever an edited file at `place` brings about in this block into one line."""
    try:
        yield
    except RecursionError as error:
        raise UserError(f"{place}: nested too deeply; {advice}") from error
    except (KeyError, IndexError, TypeError, AttributeError, ValueError, OverflowError) as error:
        kind = f"{error} is missing" if isinstance(error, KeyError) else str(error)
        raise UserError(f"{place}: damaged or edited ({kind}); {advice}") from error


def _cut_half_line(path: Path) -> None:
    """Cut off what a killed run had not written to its end."""
    with open(path, "rb+") as handle:
        whole = 0
        for line in handle:
            whole += len(line) if line.endswith(b"\n") else 0
        handle.truncate(whole)


def refuse_other(place: Path, there: dict[str, Any], wanted: dict[str, Any]) -> None:
    """Raise UserError, naming what differs, when answers at `place` were made of or by something else.

    A model is known by its fingerprint where it has one; its name may change with its place.
    """
    now = wanted["generated_by"]
    with reading(place, "give another --out"):
        before = {} if there.get("generated_by") is None else {**there["generated_by"]}
        names = ", ".join(str(item.get("name")) for item in there.get("inputs") or [])
    differing = [
        f"{name} {before.get(name)} there, {now.get(name)} now"
        for name in dict.fromkeys((*now, *before))
        if before.get(name) != now.get(name) and not (name == "model" and "fingerprint" in now)
    ]
    if there.get("inputs") != wanted["inputs"]:
        differing.append(f"the input differs ({names} there)")
    if differing:
        raise UserError(f"{place}: holds answers made otherwise: {'; '.join(differing)}; give another --out")
