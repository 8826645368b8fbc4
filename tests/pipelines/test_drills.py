"""Drills: what dies, hangs, is cut off, or fills up in the middle of a run, and the run ends with the same bytes."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from gristmill.pipelines.engine import open_engine

sys.path.append(str(Path(__file__).parent))
from machines import (
    QUIET,
    SECONDS,
    free_port,
    gristmill,
    network,
    no_namespaces,
    processes,
    wait_until,
)
from poison_stage import stops
from test_cluster import files_of, run, sound, write_corpus

pytestmark = pytest.mark.end_to_end
NO_NAMESPACES = no_namespaces()
ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, bytes]]:
    """(recipe of 12 shards, bytes of a run in one process)."""
    folder = tmp_path_factory.mktemp("drills")
    recipe = write_corpus(folder, 12)
    run(recipe, folder / "run", "--debug")
    return recipe, files_of(folder / "run")


def no_mounts() -> str:
    """Why a test cannot mount a small disk; "" where it can."""
    if shutil.which("unshare") is None or os.geteuid():
        return "mounting needs root and the program `unshare`"
    tried = subprocess.run(
        ["unshare", "-m", "mount", "-t", "tmpfs", "none", "/mnt"], capture_output=True, text=True, check=False
    )
    return f"mounting is not allowed here: {tried.stderr.strip()}" if tried.returncode else ""


NO_MOUNTS = no_mounts()


@contextmanager
def small_disk(folder: Path, size: str) -> Iterator[Path]:
    """A disk in memory, mounted on a new folder."""
    folder.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "none", str(folder)], check=True)
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=False, **QUIET)


def test_a_run_that_is_killed_again_and_again(corpus: tuple[Path, dict[str, bytes]], tmp_path: Path) -> None:
    """The short form of `make drill`."""
    command = [
        sys.executable,
        str(ROOT / "tools/drill.py"),
        "--recipe",
        str(corpus[0]),
        "--folder",
        str(tmp_path / "d"),
    ]
    options = ["--workers", "2", "--kills", "4", "--gap-s", "0.7", "--seed", "5"]
    done = subprocess.run([*command, *options], capture_output=True, text=True, timeout=280, check=False)
    said = json.loads(done.stdout)
    assert said["problems"] == []
    assert (done.returncode, said["passed"], sum(said["kills"].values())) == (0, True, 4)
    assert files_of(tmp_path / "d/run-1") == corpus[1]


def test_a_worker_that_hangs_is_given_up_by_the_scheduler(tmp_path: Path) -> None:
    """It stops itself in the middle of a piece: no heartbeat, no error, no end."""
    with processes(tmp_path) as started:
        address = f"tcp://127.0.0.1:{free_port()}"
        env = {
            **os.environ,
            "DASK_DISTRIBUTED__SCHEDULER__WORKER_TTL": "1s",
            "PYTHONPATH": os.pathsep.join([*sys.path, str(Path(__file__).parent)]),
        }
        where = address.rpartition(":")
        dask = [sys.executable, "-m", "dask"]
        scheduler = ["scheduler", "--host", "127.0.0.1", "--port", where[2], "--no-dashboard"]
        started.start([*dask, *scheduler], env=env)
        for _ in range(2):
            started.start([*dask, "worker", address, "--nthreads", "1", "--no-dashboard"], env=env)
        results: dict[int, Any] = {}
        with open_engine(scheduler=address, connect_s=SECONDS) as engine:
            wait_until(lambda: engine.workers == 2, "two workers")
            orders = [str(tmp_path / f"mark-{i}") if i == 1 else "" for i in range(6)]
            assert engine.run(stops, orders, results.__setitem__) == []
        assert set(results) == set(range(6))
        with suppress(ProcessLookupError):  # unless its nanny ended it
            os.kill(int((tmp_path / "mark-1").read_text()), signal.SIGKILL)


@pytest.mark.skipif(bool(NO_NAMESPACES), reason=NO_NAMESPACES or "none")
def test_a_host_is_cut_off_and_comes_back(corpus: tuple[Path, dict[str, bytes]], tmp_path: Path) -> None:
    recipe, expected = corpus
    with network() as net, processes(tmp_path) as started:
        address = f"tcp://{net.address}:{free_port()}"
        env = {**os.environ, "DASK_DISTRIBUTED__SCHEDULER__WORKER_TTL": "1s"}
        where = ["--host", net.address, "--port", address.rpartition(":")[2], "--no-dashboard"]
        started.start([sys.executable, "-m", "dask", "scheduler", *where], env=env)
        for _ in range(2):
            started.worker(address, before=net.host())
        command = gristmill("run", str(recipe), "--out", str(tmp_path / "run"), "--scheduler", address)
        driver = started.start(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        wait_until(lambda: any((tmp_path / "run").glob("01-*/ledger/*.json")), "a first shard")
        net.cable(0, "down")
        wait_until(lambda: len(list((tmp_path / "run").glob("01-*/ledger/*.json"))) == 12, "the rest of the segment")
        net.cable(0, "up")
        shown, _ = driver.communicate(timeout=SECONDS)
        assert driver.returncode == 0, shown.decode()
    sound(tmp_path / "run", expected)


@pytest.mark.skipif(bool(NO_MOUNTS), reason=NO_MOUNTS or "none")
def test_a_disk_that_is_full_and_then_is_not(corpus: tuple[Path, dict[str, bytes]], tmp_path: Path) -> None:
    recipe, expected = corpus
    with small_disk(tmp_path / "disk", "160k") as disk:
        shown = run(recipe, disk / "run", "--workers", "2", code=1)
        assert f"The storage of {disk}/run does not take any more: " in shown
        assert "No space left on device" in shown
        subprocess.run(["mount", "-o", "remount,size=50m", str(disk)], check=True)
        run(recipe, disk / "run", "--workers", "2")
        sound(disk / "run", expected)


JUMPING = """
import os, time
_time, _mark = time.time, os.environ["CLOCK_JUMPS"]
time.time = lambda: _time() + (float(open(_mark).read() or 0) if os.path.exists(_mark) else 0.0)
"""


@pytest.mark.parametrize("jump_s", [7_200, -7_200])
def test_a_clock_that_jumps(corpus: tuple[Path, dict[str, bytes]], tmp_path: Path, jump_s: int) -> None:
    """Of driver, scheduler and workers at once, two hours forth or back, as after a wrong time server."""
    recipe, expected = corpus
    (tmp_path / "patch").mkdir()
    (tmp_path / "patch/sitecustomize.py").write_text(JUMPING)
    path = os.pathsep.join([str(tmp_path / "patch"), *sys.path])
    env = {**os.environ, "PYTHONPATH": path, "CLOCK_JUMPS": str(tmp_path / "jump")}
    with processes(tmp_path) as started:
        command = gristmill("run", str(recipe), "--out", str(tmp_path / "run"), "--workers", "2")
        driver = started.start(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=env)
        wait_until(lambda: any((tmp_path / "run").glob("01-*/ledger/*.json")), "a first shard")
        (tmp_path / "jump.new").write_text(str(jump_s))
        os.rename(tmp_path / "jump.new", tmp_path / "jump")
        shown, _ = driver.communicate(timeout=SECONDS)
        assert driver.returncode == 0, shown.decode()
    sound(tmp_path / "run", expected)


DYING = """
import os, signal, sys
replace, count = os.replace, 0

def dying(source, target):
    global count
    if not str(target).endswith(("driver.json", "driver.lock", "recipe.yaml", "inputs.json")):
        count += 1
    if count == 7:
        if sys.argv[1] == "after":
            replace(source, target)
        os.kill(os.getpid(), signal.SIGKILL)
    replace(source, target)

os.replace = dying
from gristmill.pipelines.cli import main
main(sys.argv[2:])
"""


def test_a_driver_that_is_killed_while_it_publishes(tmp_path: Path) -> None:
    """Before the rename of a file and after it, in turn."""
    recipe = write_corpus(tmp_path / "corpus", 3)
    run(recipe, tmp_path / "quiet", "--debug")
    expected = files_of(tmp_path / "quiet")
    out = tmp_path / "run"
    command = ["run", str(recipe), "--out", str(out), "--debug"]
    deaths = 0
    while True:
        when = ("before", "after")[deaths % 2]
        done = subprocess.run(
            [sys.executable, "-c", DYING, when, *command], capture_output=True, text=True, timeout=SECONDS, check=False
        )
        if done.returncode == 0:
            break
        assert done.returncode == -signal.SIGKILL, done.stderr
        deaths += 1
        left = list(out.rglob("*.tmp"))
        assert len(left) == (when == "before")
        assert deaths < 30
    assert deaths >= 3
    sound(out, expected)
