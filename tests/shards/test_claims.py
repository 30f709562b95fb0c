"""Claims: one worker a shard, dead workers succeeded, nothing left behind."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from eagle_train.errors import UserError
from eagle_train.shards.claims import FOLDER, Claims, clear, take_in_turn


def _claim_of(folder: Path, number: int, text: str) -> Path:
    (folder / FOLDER).mkdir(exist_ok=True)
    path = folder / FOLDER / f"{number:05d}.0"
    path.write_text(text)
    return path


def test_of_many_workers_exactly_one_gets_a_shard(tmp_path: Path) -> None:
    workers = [Claims(tmp_path) for _ in range(8)]
    for number in range(20):
        with ThreadPoolExecutor(8) as pool:
            assert list(pool.map(lambda worker, n=number: worker.take(n), workers)).count(True) == 1


def test_a_claim_let_go_can_be_taken_and_the_folder_goes_with_the_last(tmp_path: Path) -> None:
    with Claims(tmp_path) as one, Claims(tmp_path) as two:
        assert one.take(3)
        assert not two.take(3)
        one.release(3)
        assert two.take(3)
    assert not (tmp_path / FOLDER).exists()


def test_the_claim_of_a_process_that_is_gone_is_taken_over_at_once(tmp_path: Path) -> None:
    program = "import sys; from pathlib import Path; from eagle_train.shards.claims import Claims\n"
    program += "Claims(Path(sys.argv[1])).take(7); import os; os._exit(9)"
    assert subprocess.run([sys.executable, "-c", program, str(tmp_path)]).returncode == 9
    assert len(list((tmp_path / FOLDER).iterdir())) == 1
    workers = [Claims(tmp_path) for _ in range(8)]
    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(lambda worker: worker.take(7), workers)).count(True) == 1
    for worker in workers:
        assert not worker.take(7)
    (mine,) = [worker for worker in workers if worker._mine]
    mine.release(7)
    assert list((tmp_path / FOLDER).iterdir()) == []


def test_a_claim_of_another_machine_expires_when_it_stops_changing(tmp_path: Path) -> None:
    claim = _claim_of(tmp_path, 0, f"elsewhere {os.getpid()} x")
    worker = Claims(tmp_path, expires=0.1)
    assert not worker.take(0)  # seen for the first time
    for _ in range(4):
        time.sleep(0.05)
        os.utime(claim)
        assert not worker.take(0)
    time.sleep(0.15)
    assert worker.take(0)


def test_a_living_worker_keeps_its_claim_however_long_it_works(tmp_path: Path) -> None:
    claim = _claim_of(tmp_path, 0, "elsewhere 1 x")  # judged by its changes alone
    with Claims(tmp_path, beat=0.02) as worker:
        worker._mine[0] = claim
        watcher = Claims(tmp_path, expires=0.3)
        deadline = time.monotonic() + 0.8
        while time.monotonic() < deadline:
            assert not watcher.take(0)
            time.sleep(0.05)


def test_a_claim_half_written_is_respected_until_it_expires(tmp_path: Path) -> None:
    _claim_of(tmp_path, 0, "")
    worker = Claims(tmp_path, expires=0.05)
    assert not worker.take(0)
    time.sleep(0.1)
    assert worker.take(0)


def test_a_shard_finished_by_another_between_look_and_claim_is_not_made_again(tmp_path: Path) -> None:
    looks = []

    def is_there(number: int) -> bool:
        looks.append(number)
        return len(looks) > 1  # not there at the first look, there after the claim

    with Claims(tmp_path) as claims:
        assert list(take_in_turn(claims, [0], is_there)) == []
        assert claims._mine == {}


def test_a_worker_waits_for_the_shards_of_others_and_takes_over_from_the_dead(tmp_path: Path) -> None:
    made: set[int] = set()
    _claim_of(tmp_path, 1, "elsewhere 1 x")  # dies without a word
    living = Claims(tmp_path)
    assert living.take(2)

    def finish_later() -> None:
        time.sleep(0.2)
        made.add(2)
        living.release(2)

    thread = threading.Thread(target=finish_later)
    thread.start()
    done: list[int] = []
    told: list[int] = []
    with Claims(tmp_path, expires=0.3) as claims:
        for number in take_in_turn(claims, range(4), made.__contains__, told.append, look=0.05):
            done.append(number)
            made.add(number)
            claims.release(number)
    thread.join()
    assert done == [0, 3, 1]
    assert told == [2]


_WORKER = """
import os, random, sys, time
from pathlib import Path
from eagle_train.io.creating import create_text
from eagle_train.shards.claims import Claims, take_in_turn
folder, seed, doomed = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3] == "doomed"
dice = random.Random(seed)
there = lambda number: (folder / f"shard-{number}").exists()
with Claims(folder) as claims:
    for count, number in enumerate(take_in_turn(claims, range(40), there, look=0.05)):
        time.sleep(dice.uniform(0, 0.02) * (1 + seed % 3))  # some machines are slower
        if doomed and count == 2:
            os.kill(os.getpid(), 9)
        with open(folder / "log", "a") as log:
            log.write(f"{number}\\n")
        assert create_text(folder / f"shard-{number}", f"{number}")
        claims.release(number)
"""


def test_ten_workers_of_which_four_are_killed_make_every_shard_once(tmp_path: Path) -> None:
    workers = [
        subprocess.Popen(
            [sys.executable, "-c", _WORKER, str(tmp_path), str(i), "doomed" if i % 3 == 0 else "safe"],
            stderr=subprocess.PIPE,
        )
        for i in range(10)
    ]
    with ThreadPoolExecutor(10) as pool:  # each is waited for at once: a dead one does not linger
        errors = list(pool.map(lambda worker: worker.communicate(timeout=60)[1].decode(), workers))
    codes = [worker.returncode for worker in workers]
    assert set(codes) <= {0, -9}, errors
    assert codes.count(-9) >= 1
    assert all(code == 0 for i, code in enumerate(codes) if i % 3), errors
    assert sorted(map(int, (tmp_path / "log").read_text().split())) == list(range(40))
    left = {path.name for path in tmp_path.iterdir()}
    assert left - {FOLDER} == {"log", *(f"shard-{n}" for n in range(40))}
    clear(tmp_path)
    assert not (tmp_path / FOLDER).exists()


def test_a_folder_that_cannot_be_claimed_in_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(UserError, match="a part of the path is a file"):
        Claims(tmp_path / "file").take(0)
    assert Claims(tmp_path / "gone").take(0)  # a folder taken away meanwhile is no reason to wait for ever


@pytest.mark.parametrize("name", ["00001.abc", "00001.", "00001.0.swp", "00001.007", "00001.²", "notes.txt"])
def test_what_is_no_claim_is_let_be(tmp_path: Path, name: str) -> None:
    (tmp_path / FOLDER).mkdir()
    (tmp_path / FOLDER / name).write_text("mine")
    with Claims(tmp_path) as one, Claims(tmp_path) as two:
        assert one.take(1)
        assert not two.take(1)
        one.release(1)
        assert two.take(1)
        clear(tmp_path)
    assert [path.name for path in (tmp_path / FOLDER).iterdir()] == [name]


def test_a_claim_of_odd_bytes_is_one_that_stopped_changing(tmp_path: Path) -> None:
    _claim_of(tmp_path, 1, "").write_bytes(b"\xff\xfe")
    worker = Claims(tmp_path, expires=0.05)
    assert not worker.take(1)
    time.sleep(0.1)
    assert worker.take(1)


def test_a_file_in_the_place_of_the_claims_is_named(tmp_path: Path) -> None:
    (tmp_path / FOLDER).write_text("x")
    with pytest.raises(UserError, match=r"\.claims: a file, wanted a folder of claims; remove it"):
        Claims(tmp_path).take(0)
