"""One driver a run folder: the second is refused by name, a stale lock is taken over, whoever comes first."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import fsspec
import orjson
import pytest

from gristmill.pipelines.lock import NAME, Holder, LockError, RunLock, holder_of, is_stale

HOLD = """
import sys
from gristmill.pipelines.lock import RunLock
with RunLock(sys.argv[1]):
    print("held", flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def first(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """Another process that holds the lock of tmp_path."""
    command = [sys.executable, "-c", HOLD, str(tmp_path)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "held\n"
    yield process
    process.kill()
    process.communicate()


def test_the_second_driver_is_refused_and_told_who_the_first_is(first: subprocess.Popen[str], tmp_path: Path) -> None:
    with pytest.raises(LockError, match=rf"process {first.pid} on {os.uname().nodename}, since 20.* UTC"):
        RunLock(str(tmp_path)).__enter__()
    assert holder_of(str(tmp_path)) is not None
    first.communicate("")  # ends in peace
    assert holder_of(str(tmp_path)) is None
    with RunLock(str(tmp_path)) as lock:
        assert lock.taken_over is None


def test_a_killed_driver_leaves_a_lock_that_the_next_one_takes_over(
    first: subprocess.Popen[str], tmp_path: Path
) -> None:
    os.kill(first.pid, signal.SIGKILL)
    first.wait()
    assert (tmp_path / NAME).exists()
    with RunLock(str(tmp_path)) as lock:
        assert lock.taken_over is not None
        assert lock.taken_over.pid == first.pid
        lock.check()
    assert not (tmp_path / NAME).exists()


def someone(**change: object) -> Holder:
    fields = {"host": "elsewhere", "pid": 1, "process_start": 0.0, "boot": "b", "started": 1e9, "renewed": 1e9}
    return Holder.model_validate({**fields, "token": "t", **change})


def test_another_host_is_believed_until_it_is_silent_for_too_long() -> None:
    assert not is_stale(someone(), 1e9 + 119, 120)
    assert is_stale(someone(), 1e9 + 121, 120)


def test_a_process_id_that_is_used_again_is_not_the_old_driver(tmp_path: Path) -> None:
    with RunLock(str(tmp_path)):
        mine = holder_of(str(tmp_path))
    assert mine is not None
    assert not is_stale(mine, time.time() + 1e6)
    assert mine.since_boot is not None
    assert is_stale(mine.model_copy(update={"since_boot": mine.since_boot - 60}), time.time())
    assert not is_stale(
        mine.model_copy(update={"process_start": mine.process_start - 60}), time.time()
    )  # a clock jumped
    old = {"since_boot": None}  # of a system that does not say
    assert not is_stale(mine.model_copy(update=old), time.time())
    assert is_stale(mine.model_copy(update={**old, "process_start": mine.process_start - 60}), time.time())
    # The same host after a reboot says nothing about processes: only the renewal counts.
    assert not is_stale(mine.model_copy(update={"boot": "other", "process_start": 0.0}), mine.renewed + 1)


@pytest.mark.parametrize("folder", ["memory://locks/run", "local"])
def test_of_many_that_come_at_once_one_gets_it(folder: str, tmp_path: Path) -> None:
    path = str(tmp_path / "run") if folder == "local" else folder
    fs, inner = fsspec.core.url_to_fs(path)
    for stale in (False, True):
        fs.makedirs(inner, exist_ok=True)
        if stale:
            fs.pipe_file(f"{inner}/{NAME}", orjson.dumps(someone().model_dump()))
        ready = threading.Barrier(8)
        locks = [RunLock(path, renew_s=0.05, say=lambda _: None) for _ in range(8)]

        def enter(lock: RunLock, ready: threading.Barrier = ready) -> bool:
            ready.wait()
            try:
                lock.__enter__()
            except LockError:
                return False
            return True

        with ThreadPoolExecutor(8) as pool:
            entered = list(pool.map(enter, locks))
        if folder == "local" or not stale:
            assert sum(entered) == 1
        for lock, mine in zip(locks, entered, strict=True):
            if mine:
                lock.__exit__()
        assert not fs.exists(f"{inner}/{NAME}")


def test_a_damaged_lock_is_taken_over(tmp_path: Path) -> None:
    (tmp_path / NAME).write_bytes(b'{"host": "a"')
    with RunLock(str(tmp_path)):
        assert holder_of(str(tmp_path)) is not None


def test_a_driver_that_lost_its_lock_stops(tmp_path: Path) -> None:
    lock = RunLock(str(tmp_path), renew_s=0.01)
    with lock:
        lock.check()
        (tmp_path / NAME).write_bytes(orjson.dumps(someone(host="thief").model_dump()))
        lock._thread.join(10)
        with pytest.raises(LockError, match="taken over by process 1 on thief"):
            lock.check()
    assert holder_of(str(tmp_path)) is not None  # the other's lock stays


def test_a_lock_alone_leaves_no_folder(tmp_path: Path) -> None:
    with RunLock(str(tmp_path / "new/run")):
        assert (tmp_path / "new/run" / NAME).exists()
    assert not (tmp_path / "new/run").exists()


def test_a_folder_that_cannot_be_written_is_one_message(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(LockError, match=r"file/run/driver\.lock cannot be written: .*--out"):
        RunLock(str(tmp_path / "file/run")).__enter__()


@pytest.mark.parametrize("jump_s", [3_600.0, -3_600.0])
def test_a_driver_of_another_host_whose_clock_is_wrong_keeps_its_lock(tmp_path: Path, jump_s: float) -> None:
    path = tmp_path / NAME
    held = someone(renewed=time.time() + jump_s)
    path.write_bytes(orjson.dumps(held.model_dump()))
    said: list[str] = []

    def renew(line: str) -> None:
        said.append(line)
        path.write_bytes(orjson.dumps(held.model_copy(update={"renewed": held.renewed + 1}).model_dump()))

    with pytest.raises(LockError, match="process 1 on elsewhere"):
        RunLock(str(tmp_path), renew_s=5.0, say=renew).__enter__()
    assert "watching it for 15 s" in said[0]
    path.write_bytes(orjson.dumps(held.model_dump()))  # and the same when nobody is behind it
    with RunLock(str(tmp_path), renew_s=0.02, say=lambda _: None) as lock:
        assert lock.taken_over == held


def test_a_lock_of_another_host_that_was_renewed_just_now_is_not_watched(tmp_path: Path) -> None:
    (tmp_path / NAME).write_bytes(orjson.dumps(someone(renewed=time.time() - 60).model_dump()))
    with pytest.raises(LockError, match="process 1 on elsewhere"):
        RunLock(str(tmp_path), say=pytest.fail).__enter__()
