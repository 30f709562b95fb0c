"""Who makes which shard, agreed through the file system alone.

A worker claims a shard by creating a file that must not be there yet, and touches it while it works. A
claim whose worker is gone is succeeded by a claim of the next generation, again created exclusively, so
that of several successors one wins. A wrongly succeeded worker does no harm: shards are written whole,
and their bytes do not depend on who writes them.
"""

from __future__ import annotations

import os
import re
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType

from eagle_train.errors import UserError
from eagle_train.io.creating import link
from eagle_train.io.paths import os_error
from eagle_train.io.whole_folder import is_running

FOLDER = ".claims"
CLOSING = -1  # claimed like a shard by the worker that writes the manifest
_EXPIRES = 120.0  # seconds; file systems across machines may show a change a minute late
_BEAT = 10.0
_LOOK = 2.0
_CLAIM = re.compile(r"(-0001|[0-9]{5,9})\.(0|[1-9][0-9]{0,8})")  # shard, generation
_UNFINISHED = re.compile(r"\.[0-9a-f]{12}\.tmp")


class Claims:
    """This worker's claims on the shards of one folder. Use as a context manager, which lets go of all.

    Whether another worker lives is judged by its process where it runs on this machine, and else by
    whether its claim changes while this worker watches: clocks are never compared.
    """

    def __init__(self, folder: Path, expires: float = _EXPIRES, beat: float = _BEAT) -> None:
        self.folder = folder / FOLDER
        self.expires, self.beat = expires, beat
        self.me = f"{socket.gethostname()} {os.getpid()} {secrets.token_hex(6)}"
        self._mine: dict[int, Path] = {}
        self._watched: dict[Path, tuple[int, float]] = {}  # last change seen, and when it was seen
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._keep_alive, daemon=True)

    def __enter__(self) -> Claims:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._closed.set()
        self._thread.join()
        for number in list(self._mine):
            self.release(number)
        with suppress(OSError):
            self.folder.rmdir()  # fails while others hold claims

    def take(self, number: int) -> bool:
        """Claim shard `number`; return False while another worker holds it.

        Look once more afterwards whether the shard is there: its maker may just have let go.
        """
        held = self._generations(number)
        if held and not self._is_abandoned(held[-1]):
            return False
        path = self.folder / f"{number:05d}.{len(held) and _generation(held[-1]) + 1}"
        whole = self.folder / f".{secrets.token_hex(6)}.tmp"  # a claim says whose it is from the first
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            whole.write_text(self.me)
            link(whole, path)
        except (FileExistsError, FileNotFoundError) as error:  # another was quicker, or took it away
            if self.folder.exists() and not self.folder.is_dir():
                raise UserError(f"{self.folder}: a file, wanted a folder of claims; remove it") from error
            return False
        except OSError as error:
            raise os_error(path, error) from error
        finally:
            with suppress(OSError):
                whole.unlink(missing_ok=True)
        self._mine[number] = path
        return True

    def release(self, number: int) -> None:
        """Let go of a claim, and of the abandoned ones that it succeeded."""
        mine = self._mine.pop(number)
        for path in self._generations(number):
            if _generation(path) <= _generation(mine):
                path.unlink(missing_ok=True)

    def _generations(self, number: int) -> list[Path]:
        found = [path for path in self.folder.glob(f"{number:05d}.*") if _CLAIM.fullmatch(path.name)]
        return sorted(found, key=_generation)

    def _is_abandoned(self, path: Path) -> bool:
        try:
            changed, text = path.stat().st_mtime_ns, path.read_text(errors="replace")
        except FileNotFoundError:
            return False  # let go just now
        except OSError as error:
            raise os_error(path, error) from error
        host, _, rest = text.partition(" ")
        process = rest.partition(" ")[0]
        if host == socket.gethostname() and process.isdigit() and not is_running(int(process)):
            return True
        seen, since = self._watched.get(path, (None, 0.0))
        if seen != changed:
            self._watched[path] = (changed, time.monotonic())
            return False
        return time.monotonic() - since > self.expires

    def _keep_alive(self) -> None:
        while not self._closed.wait(self.beat):
            for path in list(self._mine.values()):
                with suppress(OSError):  # a beat that cannot be written is one that is missed
                    os.utime(path)


def take_in_turn(
    claims: Claims,
    missing: Sequence[int],
    is_there: Callable[[int], bool],
    waiting: Callable[[int], None] = lambda count: None,
    look: float = _LOOK,
) -> Iterator[int]:
    """Yield the shards of `missing` that this worker is to make, each claimed; end when all are there.

    Towards the end it waits for other workers, and takes over from those that are gone; `waiting` is told
    once for how many shards. The caller releases each claim once the shard is written.
    """
    left, told = list(missing), False
    while left:
        others = []
        for number in left:
            if is_there(number):
                continue
            if not claims.take(number):
                others.append(number)
            elif is_there(number):
                claims.release(number)
            else:
                yield number
        left = [number for number in others if not is_there(number)]
        if left:
            if not told:
                waiting(len(left))
                told = True
            time.sleep(look)


def clear(folder: Path) -> None:
    """Take away all claims in `folder`, once every shard is there; what is no claim stays."""
    with suppress(OSError):
        for path in list((folder / FOLDER).iterdir()):
            if _CLAIM.fullmatch(path.name) or _UNFINISHED.fullmatch(path.name):
                path.unlink(missing_ok=True)
        (folder / FOLDER).rmdir()


def _generation(path: Path) -> int:
    return int(path.suffix[1:])
