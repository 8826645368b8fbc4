"""Whole runs on Dask: any number of workers, a scheduler of one's own, and kills give the same bytes."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from gristmill.pipelines.engine import EngineError, Failure, InProcess, open_engine
from gristmill.pipelines.open_run import open_run
from gristmill.pipelines.verify import verify

pytestmark = pytest.mark.end_to_end
SECONDS = 240  # of patience for a process; nothing waits that long when all is well


def command(recipe: Path, out: Path, *options: str) -> list[str]:
    return [sys.executable, "-m", "gristmill.pipelines.cli", "run", str(recipe), "--out", str(out), *options]


def gristmill(recipe: Path, out: Path, *options: str) -> str:
    """Runs the command to its end -> what it printed."""
    done = subprocess.run(command(recipe, out, *options), capture_output=True, text=True, timeout=SECONDS, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def results(out: Path) -> dict[str, bytes]:
    files = [*out.glob("*/kept/*"), *out.glob("*/dropped/*"), *out.glob("tokens/*.bin"), *out.glob("tokens/*.idx")]
    return {p.relative_to(out).as_posix(): p.read_bytes() for p in [*files, out / "tokens/shards.json"]}


@pytest.fixture(scope="module")
def reference(recipe_text: str, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, bytes]]:
    """(recipe, bytes of a run in one process)."""
    folder = tmp_path_factory.mktemp("reference")
    recipe = folder / "small.yaml"
    recipe.write_text(recipe_text)
    shown = gristmill(recipe, folder / "run", "--debug")
    assert "report.html" in shown
    assert (folder / "run/report.html").stat().st_size > 10_000
    return recipe, results(folder / "run")


@contextmanager
def processes() -> Iterator[list[subprocess.Popen[bytes]]]:
    started: list[subprocess.Popen[bytes]] = []
    try:
        yield started
    finally:
        for process in started:
            process.kill()
            process.wait()


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def wait_until(true: object, what: str) -> None:
    """Polls a callable; fails with `what` when it stays false."""
    assert callable(true)
    end = time.monotonic() + SECONDS
    while not true():
        assert time.monotonic() < end, f"waited {SECONDS} s in vain for {what}"
        time.sleep(0.02)


def start_cluster(started: list[subprocess.Popen[bytes]], folder: Path) -> tuple[str, list[int]]:
    """A scheduler and two workers as separate processes -> (address, process ids of the workers)."""
    port = free_port()
    address = f"tcp://127.0.0.1:{port}"
    dask = [sys.executable, "-m", "dask"]
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL, "cwd": folder}
    scheduler = [*dask, "scheduler", "--host", "127.0.0.1", "--port", str(port), "--no-dashboard"]
    started.append(subprocess.Popen(scheduler, **quiet))  # type: ignore[call-overload]
    for _ in range(2):
        worker = [*dask, "worker", address, "--nthreads", "1", "--host", "127.0.0.1", "--no-dashboard", "--no-nanny"]
        started.append(subprocess.Popen(worker, **quiet))  # type: ignore[call-overload]
    return address, [process.pid for process in started[1:]]


@pytest.mark.parametrize("workers", ["1", "2"])
def test_worker_processes_give_the_same_bytes(
    reference: tuple[Path, dict[str, bytes]], tmp_path: Path, workers: str
) -> None:
    recipe, expected = reference
    gristmill(recipe, tmp_path / "run", "--workers", workers)
    assert results(tmp_path / "run") == expected


def test_a_running_scheduler_gives_the_same_bytes_and_a_worker_may_die(
    reference: tuple[Path, dict[str, bytes]], tmp_path: Path
) -> None:
    recipe, expected = reference
    with processes() as started:
        address, workers = start_cluster(started, tmp_path)
        driver = subprocess.Popen(
            command(recipe, tmp_path / "run", "--scheduler", address), stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        )
        started.append(driver)
        wait_until(lambda: any((tmp_path / "run").glob("01-*/ledger/*.json")), "a first shard")
        os.kill(workers[0], signal.SIGKILL)
        shown, _ = driver.communicate(timeout=SECONDS)
        assert driver.returncode == 0, shown.decode()
    assert results(tmp_path / "run") == expected
    assert verify(open_run(tmp_path / "run")) == []


def test_a_killed_driver_goes_on_with_the_same_command(
    reference: tuple[Path, dict[str, bytes]], tmp_path: Path
) -> None:
    recipe, expected = reference
    with processes() as started:
        driver = subprocess.Popen(
            command(recipe, tmp_path / "run", "--workers", "2"), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        started.append(driver)
        wait_until(lambda: any((tmp_path / "run").glob("02-*/ledger/*.json")), "the second segment")
        driver.kill()
        driver.wait()
    shown = gristmill(recipe, tmp_path / "run", "--workers", "2")
    assert "Going on:" in shown
    assert results(tmp_path / "run") == expected
    assert verify(open_run(tmp_path / "run")) == []
    assert not [p for p in (tmp_path / "run").rglob(".*.tmp")]


def test_no_scheduler_is_one_clear_message() -> None:
    wanted = pytest.raises(EngineError, match=r"No Dask scheduler answers at tcp://127\.0\.0\.1:\d+.*dask scheduler")
    with wanted, open_engine(scheduler=f"tcp://127.0.0.1:{free_port()}", connect_s=1.0):
        pass


def _half(order: int) -> int:
    if order == 3:
        raise ValueError("three cannot be halved")
    return order // 2


def test_failures_are_listed_and_the_others_done() -> None:
    found: dict[int, int] = {}
    failures = InProcess().run(_half, [2, 3, 4], found.__setitem__)
    assert found == {0: 1, 2: 2}
    assert failures == [Failure(1, "ValueError: three cannot be halved")]


def test_storage_errors_are_tried_again() -> None:
    calls = []

    def flaky(order: int) -> int:
        calls.append(order)
        if len(calls) < 3:
            raise OSError("connection reset")
        return order

    pauses: list[float] = []
    assert InProcess(pauses.append).run(flaky, [7], lambda *_: None) == []
    assert pauses == [0.5, 2.0]
    assert calls == [7, 7, 7]

    def broken(order: int) -> int:
        raise OSError(28, "No space left on device")

    (failure,) = InProcess().run(broken, [1, 2], lambda *_: None)  # the second is not begun
    assert "No space left on device" in failure.error
    assert failure.kind == "storage"
