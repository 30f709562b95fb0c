"""A file is there whole or not at all; what killed writers leave goes."""

import errno
import json
import os

import pytest

from eagle_train.errors import UserError
from eagle_train.io.text import write_json
from eagle_train.io.whole_file import replacing, sweep


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


def test_two_writers_of_one_file_never_meet(tmp_path):
    with replacing(tmp_path / "a") as one, replacing(tmp_path / "a") as two:
        assert one != two
        one.write_text("one")
        two.write_text("two")
    assert (tmp_path / "a").read_text() == "one"  # closed last
    assert os.listdir(tmp_path) == ["a"]


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
