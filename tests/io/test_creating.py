"""Of many writers exactly one makes the file."""

import errno
import os
from concurrent.futures import ThreadPoolExecutor

import pytest

from eagle_train.io.creating import create_text


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
