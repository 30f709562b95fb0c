"""A folder takes its place whole, and what a killed writer had moved comes back."""

import os
import subprocess
import sys

import pytest

from eagle_train.io.whole_folder import is_running, replacing_folder


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
