"""Files are whole or not there, and their errors are sentences."""

import errno
import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from eagle_train.errors import UserError, nearest
from eagle_train.io.checksums import sha256_json
from eagle_train.io.creating import create_text
from eagle_train.io.tensors import load_tensors, save_tensors
from eagle_train.io.text import read_json, write_json, write_text
from eagle_train.io.whole_file import replacing, sweep
from eagle_train.io.whole_folder import is_running, replacing_folder
from eagle_train.shards.files import open_shard


def test_replacing_leaves_the_old_file_when_the_writer_fails(tmp_path):
    path = tmp_path / "record.json"
    write_json(path, {"a": 1})
    with pytest.raises(RuntimeError), replacing(path) as temporary:
        temporary.write_text("half")
        raise RuntimeError
    assert json.loads(path.read_text()) == {"a": 1}
    assert os.listdir(tmp_path) == ["record.json"]


def test_a_full_disk_is_a_sentence_and_leaves_nothing(tmp_path):
    with pytest.raises(UserError, match=r"record: No space left on device \(the disk is full"):  # noqa: SIM117
        with replacing(tmp_path / "record") as temporary:
            temporary.write_text("half")
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    assert os.listdir(tmp_path) == []


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
def test_safetensors_on_a_full_disk_is_the_same_sentence(tmp_path, monkeypatch):
    import safetensors.torch

    def full(*args, **kwargs):
        raise safetensors.SafetensorError(
            "Error while serializing: I/O error: No space left on device (os error 28)"
        )

    monkeypatch.setattr(safetensors.torch, "save_file", full)
    with pytest.raises(UserError, match="the disk is full"):
        save_tensors(tmp_path / "a.safetensors", {"x": torch.zeros(2)})
    assert os.listdir(tmp_path) == []


def test_tensors_return_by_value_and_bytes_depend_on_content_only(tmp_path):
    tensors = {"b": torch.arange(6).view(2, 3).t(), "a": torch.randn(3).bfloat16()}
    save_tensors(tmp_path / "1", tensors, {"header": "{}"})
    save_tensors(tmp_path / "2", dict(reversed(tensors.items())), {"header": "{}"})
    read, metadata = load_tensors(tmp_path / "1")
    assert metadata == {"header": "{}"}
    assert all(torch.equal(read[name], tensors[name]) for name in tensors)
    assert (tmp_path / "1").read_bytes() == (tmp_path / "2").read_bytes()


@pytest.mark.parametrize("read", [load_tensors, lambda path: read_json(path, "make it again"), open_shard])
def test_a_pipe_in_place_of_a_file_is_refused_and_not_waited_for(tmp_path, read):
    os.mkfifo(tmp_path / "pipe")
    with (
        ThreadPoolExecutor(1) as pool,
        pytest.raises(UserError, match=r"pipe: a pipe, a socket or a device, wanted a file"),
    ):
        waiting = pool.submit(read, tmp_path / "pipe")
        try:
            waiting.result(30)
        finally:  # let a reader that waits go, so that the test ends
            if not waiting.done():
                os.close(os.open(tmp_path / "pipe", os.O_WRONLY))


def test_damaged_files_are_named(tmp_path):
    (tmp_path / "cut.safetensors").write_bytes(b"\x10\0\0\0\0\0\0\0{")
    with pytest.raises(UserError, match=r"cut\.safetensors: damaged or not safetensors"):
        load_tensors(tmp_path / "cut.safetensors")
    with pytest.raises(UserError, match="not found"):
        load_tensors(tmp_path / "none")
    (tmp_path / "cut.json").write_text('{"a": ')
    with pytest.raises(UserError, match=r"cut\.json: not valid JSON .*make it again"):
        read_json(tmp_path / "cut.json", "make it again")
    (tmp_path / "list.json").write_text("[]")
    with pytest.raises(UserError, match="holds a JSON list, wanted an object"):
        read_json(tmp_path / "list.json", "x")
    with pytest.raises(UserError, match=r"none\.json: not found; make it"):
        read_json(tmp_path / "none.json", "make it")


def test_half_a_character_is_one_line_whether_read_or_written(tmp_path):
    file = tmp_path / "a.json"
    file.write_text(r'{"name": "\ud83d\ude00", "path": "C:\\udata"}')
    assert read_json(file, "x") == {"name": "\U0001f600", "path": r"C:\udata"}
    for text in (r'{"name": "\ud83d"}', r'{"\uDE00": 1}'):
        file.write_text(text)
        with pytest.raises(
            UserError, match=r"a\.json: holds half a character \('.ud[8e].*'\); make it again$"
        ):
            read_json(file, "make it again")
    for write in (write_text, create_text):
        with pytest.raises(UserError, match=r"new: half a character, '.+udce4' after 'a na', cannot be"):
            write(tmp_path / "new", "a na\udce4ve name")
    assert list(tmp_path.iterdir()) == [file]


def test_user_error_is_one_line_and_nearest_names_help():
    assert str(UserError("a\n  b")) == "a b"
    assert nearest("optm", ["optim", "loss"]) == "; did you mean 'optim'?"
    assert nearest("zzz", ["optim"]) == ""


def test_sha256_json_ignores_key_order():
    assert sha256_json({"a": 1, "b": 2}) == sha256_json({"b": 2, "a": 1}) != sha256_json({"a": 2, "b": 1})


def test_tensor_files_are_as_readable_as_any_new_file(tmp_path):
    save_tensors(tmp_path / "a.safetensors", {"x": torch.zeros(2)})
    write_json(tmp_path / "b.json", {})
    modes = {(tmp_path / name).stat().st_mode & 0o777 for name in ("a.safetensors", "b.json")}
    assert len(modes) == 1


def test_two_writers_of_one_file_never_meet(tmp_path):
    with replacing(tmp_path / "a") as one, replacing(tmp_path / "a") as two:
        assert one != two
        one.write_text("one")
        two.write_text("two")
    assert (tmp_path / "a").read_text() == "one"  # closed last
    assert os.listdir(tmp_path) == ["a"]


def test_of_many_writers_at_once_exactly_one_creates_the_file(tmp_path):
    with ThreadPoolExecutor(8) as pool:
        made = list(pool.map(lambda i: create_text(tmp_path / "plan", f"{i}" * 9), range(32)))
    assert made.count(True) == 1
    assert (tmp_path / "plan").read_text() == f"{made.index(True)}" * 9
    assert os.listdir(tmp_path) == ["plan"]


@pytest.mark.parametrize("number", [errno.EPERM, errno.ENOTSUP])
def test_a_file_system_without_links_creates_too(tmp_path, monkeypatch, number):
    def refuse(*names):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "link", refuse)
    assert create_text(tmp_path / "plan", "a")
    assert not create_text(tmp_path / "plan", "b")
    assert (tmp_path / "plan").read_text() == "a"
    assert os.listdir(tmp_path) == ["plan"]


def test_what_killed_writers_left_is_swept_and_nothing_else(tmp_path):
    for name in ("a", "b"):
        place = tmp_path / f".{name}.0123456789ab.tmp"
        place.mkdir()
        (place / ".tmpXyZ123").write_text("half")
        (tmp_path / name).write_text(name)
    (tmp_path / ".a.of-a-library.tmp").write_text("half")
    sweep(tmp_path, "a")
    assert sorted(os.listdir(tmp_path)) == [".b.0123456789ab.tmp", "a", "b"]
    sweep(tmp_path)
    assert sorted(os.listdir(tmp_path)) == ["a", "b"]


def test_a_folder_takes_its_place_whole_or_not_at_all(tmp_path):
    with replacing_folder(tmp_path / "deep/a") as fresh:
        (fresh / "one").write_text("one")
        assert not (tmp_path / "deep/a").exists()
    with pytest.raises(KeyError), replacing_folder(tmp_path / "deep/a") as fresh:
        (fresh / "two").write_text("two")
        raise KeyError
    assert os.listdir(tmp_path / "deep") == ["a"]
    assert os.listdir(tmp_path / "deep/a") == ["one"]
    with replacing_folder(tmp_path / "deep/a") as fresh:
        (fresh / "two").write_text("two")
    assert os.listdir(tmp_path / "deep") == ["a"]
    assert os.listdir(tmp_path / "deep/a") == ["two"]


_KILLED = """
import os, sys
from eagle_train.io.whole_folder import replacing_folder
own = os.replace
def replace(old, new):
    if str(old).endswith("new"):
        os._exit(9)
    own(old, new)
os.replace = replace
with replacing_folder(sys.argv[1]) as fresh:
    (fresh / "new").write_text("new")
"""


def test_an_earlier_folder_that_a_killed_writer_had_moved_comes_back(tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "a/kept").write_text("kept")
    assert subprocess.run([sys.executable, "-c", _KILLED, str(tmp_path / "a")]).returncode == 9
    assert not (tmp_path / "a").exists()
    with pytest.raises(KeyError), replacing_folder(tmp_path / "a"):
        raise KeyError
    assert os.listdir(tmp_path) == ["a"]
    assert os.listdir(tmp_path / "a") == ["kept"]


def test_the_place_of_a_living_writer_is_left_alone(tmp_path):
    assert is_running(os.getpid())
    assert is_running(1)  # another user's, as a rule
    assert not is_running(2**40)
    living = tmp_path / f".a.{os.getppid()}.tmp"
    earlier_of_this_number = tmp_path / f".a.{os.getpid()}.tmp"
    for place in (living, earlier_of_this_number):
        (place / "new").mkdir(parents=True)
        (place / "new/half").write_text("half")
    with replacing_folder(tmp_path / "a") as fresh:
        assert os.listdir(fresh) == []
    assert sorted(os.listdir(tmp_path)) == [living.name, "a"]
