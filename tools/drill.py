"""The fault drill: a run is killed again and again, and must end with the bytes of an undisturbed one.

    python tools/drill.py                        # demo recipe, 4 workers, 30 kills: `make drill`
    python tools/drill.py --recipe r.yaml --kills 4 --workers 2 --gap-s 0.5

First the recipe runs undisturbed. Then it runs on a scheduler and workers of their own, while a seeded hand kills
workers, scheduler and driver (kill -9) and ends the driver (SIGTERM) at random moments. What an operator or a service
manager would do is done here: what died is started again, the driver by the same command. A run that ends before the
last kill is followed by another one in a folder of its own.

Passed when, for every run: kept and dropped documents, models, tokenizer and token shards have the same bytes, the
books balance (`gristmill verify`), and no file is there that the undisturbed run does not have. Prints what it did, as
one line of JSON in the end. Exit code 0 passed, 1 not.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil

ROOT = Path(__file__).resolve().parent.parent
TARGETS = {"worker": 6, "scheduler": 2, "driver": 2, "driver, SIGTERM": 1}  # weights of the hand
OF_THE_RUN = ("failed", "driver.json", "report.html")  # may differ: what the driver says of itself, times
LIMIT_S = 1_800.0


def command(recipe: Path, out: Path, *options: str) -> list[str]:
    base = [sys.executable, "-m", "gristmill.pipelines.cli", "run", str(recipe), "--out", str(out), "--no-ablation"]
    return [*base, *options]


def results(out: Path) -> dict[str, str]:
    """Relative path -> digest, of all that must be the same."""
    patterns = (
        "*/kept/*",
        "*/dropped/*",
        "tokens/*.bin",
        "tokens/*.idx",
        "tokens/shards.json",
        "tokens/tokenizer.json",
    )
    files = {path for pattern in patterns for path in out.glob(pattern)}
    files |= {path for path in out.glob("models/*/*") if path.name != "card.json" and path.is_file()}
    return {p.relative_to(out).as_posix(): hashlib.sha256(p.read_bytes()).hexdigest() for p in sorted(files)}


def stray(out: Path, quiet: Path) -> list[str]:
    """Files of a run that the undisturbed one does not have."""

    def names(folder: Path) -> set[str]:
        found = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}
        return {name for name in found if name.split("/", maxsplit=1)[0] not in OF_THE_RUN}

    return sorted(names(out) ^ names(quiet))


class Cluster:
    """Scheduler, workers and driver, each started again when it is gone."""

    def __init__(self, folder: Path, workers: int) -> None:
        with socket.socket() as listener:
            listener.bind(("127.0.0.1", 0))
            self.port = int(listener.getsockname()[1])
        self.address, self.folder, self.count = f"tcp://127.0.0.1:{self.port}", folder, workers
        self.scheduler: subprocess.Popen[bytes] | None = None
        self.workers: list[subprocess.Popen[bytes]] = []
        self.driver: subprocess.Popen[bytes] | None = None
        self.starts: Counter[str] = Counter()

    def start(self, what: str, words: list[str]) -> subprocess.Popen[bytes]:
        self.starts[what] += 1
        temporary = self.folder / "tmp"
        temporary.mkdir(exist_ok=True)
        with (self.folder / f"{what}.log").open("ab") as log:
            return subprocess.Popen(
                words,
                cwd=self.folder,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                env={**os.environ, "TMPDIR": str(temporary)},
            )

    def keep_up(self) -> None:
        """What a service manager does."""
        dask = [sys.executable, "-m", "dask"]
        if self.scheduler is None or self.scheduler.poll() is not None:
            where = ["--host", "127.0.0.1", "--port", str(self.port), "--no-dashboard"]
            self.scheduler = self.start("scheduler", [*dask, "scheduler", *where])
        self.workers = [worker for worker in self.workers if worker.poll() is None]
        while len(self.workers) < self.count:
            how = ["--nthreads", "1", "--host", "127.0.0.1", "--no-dashboard", "--memory-limit", "2GB"]
            self.workers.append(self.start("worker", [*dask, "worker", self.address, *how]))

    def victims(self, target: str) -> list[int]:
        """Process ids of a kind."""
        if target == "worker":  # the process that works, or the nanny above it
            nannies = [psutil.Process(worker.pid) for worker in self.workers if worker.poll() is None]
            below = [child.pid for nanny in nannies for child in _children(nanny)]
            return [*below, *(nanny.pid for nanny in nannies)]
        process = self.scheduler if target == "scheduler" else self.driver
        return [process.pid] if process is not None and process.poll() is None else []

    def end(self) -> None:
        for process in (self.driver, *self.workers, self.scheduler):
            if process is not None:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()


def _children(process: psutil.Process) -> list[psutil.Process]:
    with suppress(psutil.NoSuchProcess):
        return [child for child in process.children() if "multiprocessing.spawn" in " ".join(child.cmdline())]
    return []


class Drill:
    """Kills with a seed, until as many are done as were asked for."""

    def __init__(self, recipe: Path, folder: Path, *, workers: int, kills: int, seed: int, gap_s: float) -> None:
        self.recipe, self.folder, self.left, self.gap_s = recipe, folder, kills, gap_s
        self.workers = workers
        self.hand = random.Random(seed)  # noqa: S311  no secret
        self.killed: Counter[str] = Counter()
        self.starts: Counter[str] = Counter()
        self.retried = 0  # starts with --retry-failed: the hand hit one shard three times
        self.problems: list[str] = []

    def quiet(self) -> Path:
        out = self.folder / "quiet"
        with (self.folder / "quiet.log").open("wb") as log:
            done = subprocess.run(
                command(self.recipe, out, "--workers", str(self.workers)), stdout=log, stderr=log, check=False
            )
        if done.returncode:
            raise SystemExit(f"The undisturbed run failed; see {self.folder}/quiet.log.")
        return out

    def disturbed(self, out: Path) -> None:
        """One run to its end, killed on the way while there are kills left."""
        end = time.monotonic() + LIMIT_S
        with self._cluster() as cluster:
            options = ["--scheduler", cluster.address]
            next_kill = time.monotonic() + self._gap() + 3.0
            while time.monotonic() < end:
                cluster.keep_up()
                if cluster.driver is None or cluster.driver.poll() is not None:
                    if cluster.driver is not None and cluster.driver.returncode == 0:
                        break
                    aside = any((out / "failed").glob("*.json")) and _set_aside(out) and not self.left
                    self.retried += aside
                    cluster.driver = cluster.start(
                        "driver", command(self.recipe, out, *options, *(["--retry-failed"] if aside else []))
                    )
                if self.left and time.monotonic() >= next_kill and self._kill(cluster):
                    next_kill = time.monotonic() + self._gap()
                time.sleep(0.05)
            else:
                self.problems.append(f"{out.name}: not done within {LIMIT_S:.0f} s")
        self.starts.update(cluster.starts)

    def _gap(self) -> float:
        return self.hand.uniform(0.2, 2.0) * self.gap_s

    def _kill(self, cluster: Cluster) -> bool:
        target = self.hand.choices(list(TARGETS), list(TARGETS.values()))[0]
        pids = cluster.victims(target)
        if not pids:
            return False
        pid = self.hand.choice(pids)
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGTERM if "SIGTERM" in target else signal.SIGKILL)
            self.killed[target] += 1
            self.left -= 1
            return True
        return False

    @contextmanager
    def _cluster(self) -> Iterator[Cluster]:
        cluster = Cluster(self.folder, self.workers)
        try:
            yield cluster
        finally:
            cluster.end()

    def check(self, out: Path, quiet: Path) -> None:
        mine, theirs = results(out), results(quiet)
        if not theirs:
            self.problems.append("the undisturbed run has no results")
        differ = sorted(name for name in mine.keys() | theirs.keys() if mine.get(name) != theirs.get(name))
        self.problems += [f"{out.name}: other bytes: {name}" for name in differ]
        self.problems += [f"{out.name}: stray or missing: {name}" for name in stray(out, quiet)]
        verify = [sys.executable, "-m", "gristmill.pipelines.cli", "verify", str(out)]
        done = subprocess.run(verify, capture_output=True, text=True, check=False)
        if done.returncode:
            self.problems.append(f"{out.name}: {done.stdout.strip()}")


def _set_aside(out: Path) -> bool:
    records = [json.loads(path.read_text()) for path in (out / "failed").glob("*.json")]
    return any(record.get("kind") in ("killed", "fault") for record in records)


def demo(folder: Path) -> Path:
    """The demo recipe on a corpus of its own, about a third of the demo's."""
    from gristmill.pipelines import demo_corpus

    corpus = folder / "corpus"
    settings = demo_corpus.DemoCorpusSettings(library_modules=60, stdlib_modules=600, code_bytes=3_000_000)
    demo_corpus.build(corpus, settings, lambda *_: None)
    text = (ROOT / "pipelines/recipes/demo.yaml").read_text()
    recipe = folder / "demo.yaml"
    recipe.write_text(text.replace("out/demo/corpus", str(corpus)).split("\nablation:")[0] + "\n")
    return recipe


def main() -> None:
    asked = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    asked.add_argument("--recipe", type=Path, help="default: the demo recipe, on a corpus made here")
    asked.add_argument("--folder", type=Path, default=Path("build/drill"), help="to work in; must not hold a drill")
    asked.add_argument("--workers", type=int, default=4)
    asked.add_argument("--kills", type=int, default=30)
    asked.add_argument("--seed", type=int, default=1)
    asked.add_argument("--gap-s", type=float, default=3.0, help="mean seconds between kills, about")
    options = asked.parse_args()
    folder = options.folder.resolve()
    if any(folder.glob("run-*")):
        raise SystemExit(f"{folder} holds an earlier drill. Delete it, or name another --folder.")
    folder.mkdir(parents=True, exist_ok=True)
    recipe = (options.recipe or demo(folder)).resolve()
    drill = Drill(recipe, folder, workers=options.workers, kills=options.kills, seed=options.seed, gap_s=options.gap_s)
    begun = time.monotonic()
    quiet = drill.quiet()
    quiet_s, rounds = time.monotonic() - begun, 0
    while drill.left and not drill.problems:
        rounds += 1
        out = folder / f"run-{rounds}"
        drill.disturbed(out)
        if not drill.problems:
            drill.check(out, quiet)
    said: dict[str, Any] = {
        "passed": not drill.problems,
        "kills": dict(drill.killed),
        "rounds": rounds,
        "starts": dict(drill.starts),
        "retried_set_aside": drill.retried,
        "files_compared": len(results(quiet)),
        "undisturbed_s": round(quiet_s, 1),
        "seconds": round(time.monotonic() - begun, 1),
        "problems": drill.problems[:20],
    }
    print(json.dumps(said))
    raise SystemExit(1 if drill.problems else 0)


if __name__ == "__main__":
    main()
