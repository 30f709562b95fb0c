"""What is read: a pipe is not waited for, damage is named, half a character is one line."""

import os
from concurrent.futures import ThreadPoolExecutor

import pytest

from eagle_train.errors import UserError
from eagle_train.io.creating import create_text
from eagle_train.io.tensors import load_tensors
from eagle_train.io.text import read_json, write_text
from eagle_train.shards.files import open_shard


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
