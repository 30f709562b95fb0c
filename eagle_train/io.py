"""Files and folders that are either whole or not there: write to a temporary name, flush, rename.

Every record of the project is written through this file, so a killed process or a full disk never
leaves something half-written under a name that a later command reads.
"""

from __future__ import annotations

import contextlib
import errno
import glob
import hashlib
import json
import os
import re
import secrets
import shutil
import stat
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from eagle_train.errors import UserError

if TYPE_CHECKING:
    import torch

_ADVICE = {
    errno.ENOSPC: "the disk is full; free some room and run the same command again",
    errno.EDQUOT: "the disk quota is used up; free some room and run the same command again",
    errno.EACCES: "no permission; choose another --out or change the folder's owner",
    errno.EPERM: "not permitted; choose another --out",
    errno.EROFS: "the file system is read-only; choose another --out",
    errno.ENOTDIR: "a part of the path is a file; choose another --out",
    errno.EISDIR: "the path is a folder; choose another name",
    errno.EFBIG: "the file system or the process limit does not allow a file of that size",
    errno.EEXIST: "a file of that name is in the way; choose another --out",
    errno.ENAMETOOLONG: "the name is too long; choose a shorter --out",
}


_BEFORE = "before"
_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")
_HIDDEN = ((errno.ENOSPC, "No space left"), (errno.EDQUOT, "quota"), (errno.EFBIG, "File too large"))


def os_error(path: str | os.PathLike[str], error: OSError) -> UserError:
    """Turn an operating-system error about `path` into the sentence a user reads."""
    advice = _ADVICE.get(error.errno or 0, "check the path")
    reason = error.strerror or str(error)
    return UserError(f"{os.fspath(path)}: {reason} ({advice})")


def refuse_special(path: str | os.PathLike[str]) -> None:
    """Raise UserError for a pipe, a socket or a device: opening one may wait for ever.

    Whatever else is wrong with the path, opening it says.
    """
    try:
        mode = os.stat(path).st_mode
    except OSError:
        return
    if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
        raise UserError(
            f"{os.fspath(path)}: a pipe, a socket or a device, wanted a file; put the file in its place"
        )


def make_folder(path: str | os.PathLike[str]) -> Path:
    """Create the folder `path` with its parents; raise UserError where that cannot be done."""
    folder = Path(path)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise os_error(folder, error) from error
    return folder


@contextlib.contextmanager
def replacing(path: str | os.PathLike[str]) -> Iterator[Path]:
    """Yield a temporary name beside `path`; on success flush it to disk and rename it to `path`.

    On any failure the temporary file is removed. Operating-system errors become UserError. It lies in a
    folder of its own, named at random: two writers never meet, on any machine, and what a library leaves
    beside a file that it was killed in is known by its place, ``.NAME.*.tmp``.
    """
    final = Path(path)
    make_folder(final.parent)
    place = _temporary(final)
    temporary = place / final.name
    try:
        place.mkdir()
        yield temporary
        _flush(temporary)
        os.replace(temporary, final)
        _flush_folder(final.parent)
    except OSError as error:
        raise os_error(final, error) from error
    finally:
        shutil.rmtree(place, ignore_errors=True)


def sweep(folder: str | os.PathLike[str], name: str = "*") -> None:
    """Remove what killed writers of the file `name`, or of any, left in `folder`."""
    for leftover in Path(folder).glob(f".{name}.*.tmp"):
        if leftover.is_dir():
            shutil.rmtree(leftover, ignore_errors=True)
        else:
            with contextlib.suppress(OSError):
                leftover.unlink(missing_ok=True)


@contextlib.contextmanager
def replacing_folder(path: str | os.PathLike[str]) -> Iterator[Path]:
    """Yield a new empty folder; on success flush it to disk and give it the name `path`.

    An earlier folder of that name goes only once the new one has taken its place; on any failure it is as
    it was. It lies in a place named after this process, ``.NAME.PROCESS.tmp``; those of processes that run
    no more are cleared away first. Operating-system errors become UserError.
    """
    final = Path(path)
    make_folder(final.parent)
    place = final.with_name(f".{final.name}.{os.getpid()}.tmp")
    fresh = place / "new"
    try:
        for left in final.parent.glob(f".{glob.escape(final.name)}.*.tmp"):
            number = left.name.removeprefix(f".{final.name}.").removesuffix(".tmp")
            if number.isdecimal() and (int(number) == os.getpid() or not is_running(int(number))):
                _clear(left, final)
        try:
            fresh.mkdir(parents=True)
            yield fresh
            for file in fresh.rglob("*"):
                if file.is_file():
                    _flush(file)
            _flush_folder(fresh)
            if final.exists():
                os.replace(final, place / _BEFORE)
            os.replace(fresh, final)
            _flush_folder(final.parent)
        finally:
            _clear(place, final)
    except OSError as error:
        raise os_error(final, error) from error


def _clear(place: Path, final: Path) -> None:
    """Remove a writer's place; an earlier folder that was moved there goes back where none followed it."""
    if (place / _BEFORE).exists() and not final.exists():
        os.replace(place / _BEFORE, final)
    shutil.rmtree(place, ignore_errors=True)


def is_running(process: int) -> bool:
    """Return whether this machine runs a process of that number, whoever's it is."""
    try:
        os.kill(process, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:
        return True
    return True


def create_text(path: str | os.PathLike[str], content: str) -> bool:
    """Write `content` to `path`, whole, unless a file of that name is there: then return False.

    Of several writers at the same moment exactly one gets True. Raises UserError where it cannot write.
    """
    final = Path(path)
    make_folder(final.parent)
    temporary = _temporary(final)
    try:
        with open(temporary, "xb") as handle:
            handle.write(_encoded(path, content))
            handle.flush()
            os.fsync(handle.fileno())
        link(temporary, final)
        _flush_folder(final.parent)
    except FileExistsError:
        return False
    except OSError as error:
        raise os_error(final, error) from error
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
    return True


def link(temporary: Path, final: Path) -> None:
    """Give `temporary` the name `final` too; raises FileExistsError where a rename would replace a file."""
    try:
        os.link(temporary, final)
    except OSError as error:
        if error.errno not in (errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS):
            raise
        with open(final, "xb") as handle:  # a file system without links
            handle.write(temporary.read_bytes())


def _temporary(final: Path) -> Path:
    return final.with_name(f".{final.name}.{secrets.token_hex(6)}.tmp")


def _flush(file: Path) -> None:
    with open(file, "rb") as handle:
        os.fsync(handle.fileno())


def _flush_folder(folder: Path) -> None:
    """Make a rename durable. Some file systems cannot flush a folder: then there is nothing to do."""
    with contextlib.suppress(OSError):
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def write_bytes(path: str | os.PathLike[str], content: bytes) -> None:
    """Write `content` to `path`, whole or not at all."""
    with replacing(path) as temporary:
        temporary.write_bytes(content)


def write_text(path: str | os.PathLike[str], content: str) -> None:
    """Write `content` to `path` as UTF-8, whole or not at all. Raises UserError for half a character."""
    write_bytes(path, _encoded(path, content))


def _encoded(path: str | os.PathLike[str], content: str) -> bytes:
    try:
        return content.encode("utf-8")
    except UnicodeEncodeError as error:
        half = error.object[error.start : error.start + 1]
        around = error.object[max(0, error.start - 20) : error.start]
        raise UserError(
            f"{os.fspath(path)}: half a character, {half!r} after {around!r}, cannot be written; correct the "
            "name or setting that it comes from"
        ) from error


def write_json(path: str | os.PathLike[str], value: Any) -> None:
    """Write `value` to `path` as indented JSON, keys in the order given, whole or not at all."""
    write_text(path, json.dumps(value, indent=2, ensure_ascii=False) + "\n")


def read_json(path: str | os.PathLike[str], missing: str) -> dict[str, Any]:
    """Read one JSON object. `missing` says what to do when the file is not there.

    Raises UserError for a missing, unreadable or damaged file, or one with half a character in it.
    """
    file = Path(path)
    try:
        refuse_special(file)
        text = file.read_text(encoding="utf-8")
        value = json.loads(text)
        if _SURROGATE.search(text):  # two of them may be one character
            json.dumps(value, ensure_ascii=False).encode()
    except FileNotFoundError as error:
        raise UserError(f"{file}: not found; {missing}") from error
    except OSError as error:
        raise os_error(file, error) from error
    except RecursionError as error:
        raise UserError(f"{file}: JSON nested too deeply to be read; {missing}") from error
    except UnicodeEncodeError as error:
        raise UserError(
            f"{file}: holds half a character ({error.object[error.start]!r}); {missing}"
        ) from error
    except ValueError as error:
        raise UserError(f"{file}: not valid JSON ({error}); {missing}") from error
    if not isinstance(value, dict):
        raise UserError(f"{file}: holds a JSON {type(value).__name__}, wanted an object; {missing}")
    return value


def save_tensors(
    path: str | os.PathLike[str],
    tensors: Mapping[str, torch.Tensor],
    metadata: Mapping[str, str] | None = None,
) -> None:
    """Write tensors as one safetensors file, whole or not at all. The bytes depend only on content.

    safetensors writes tensors in a fixed order but its metadata map in an arbitrary one, so callers
    that need equal bytes pass at most one metadata key (a JSON text under it is fine).
    """
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    contiguous = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    with replacing(path) as temporary:
        try:
            save_file(contiguous, str(temporary), metadata=dict(metadata) if metadata else None)
        except SafetensorError as error:  # it hides the operating system's error in its text
            for number, words in _HIDDEN:
                if words in str(error):
                    raise OSError(number, os.strerror(number)) from error
            raise
        temporary.chmod(0o666 & ~_umask())  # safetensors makes its files private


def _umask() -> int:
    mask = os.umask(0o022)
    os.umask(mask)
    return mask


def load_tensors(path: str | os.PathLike[str]) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """Read a whole safetensors file: its tensors (on the CPU) and its metadata.

    Raises UserError for a missing or damaged file, or what is no file.
    """
    from safetensors import SafetensorError, safe_open

    refuse_special(path)
    try:
        with safe_open(os.fspath(path), framework="pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            return tensors, dict(file.metadata() or {})
    except FileNotFoundError as error:
        raise UserError(f"{os.fspath(path)}: not found") from error
    except OSError as error:
        raise os_error(path, error) from error
    except SafetensorError as error:
        raise UserError(f"{os.fspath(path)}: damaged or not safetensors ({error})") from error


def sha256_bytes(content: bytes) -> str:
    """Return the hexadecimal SHA-256 of `content`."""
    return hashlib.sha256(content).hexdigest()


def sha256_json(value: Any) -> str:
    """Return the SHA-256 of a JSON value, independent of key order and spacing."""
    text = json.dumps(value, sort_keys=True, ensure_ascii=True, separators=(",", ":"))
    return sha256_bytes(text.encode())


def sha256_file(path: str | os.PathLike[str]) -> str:
    """Return the hexadecimal SHA-256 of a file's bytes, read in pieces of 1 MiB."""
    digest = hashlib.sha256()
    with open(path, "rb") as handle:
        while piece := handle.read(1 << 20):
            digest.update(piece)
    return digest.hexdigest()
