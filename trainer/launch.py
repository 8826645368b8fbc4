"""Starts a training run and sees it through.

    outcome = run(config, "mixtures/blend.yaml", "out/demo/run/tokens", "out/one", on_progress=print)
    outcome.status, outcome.scores.mean

The ranks run under torchrun, which starts the group again from the last checkpoint when a rank dies. Everything stays
on the loopback interface. One rank needs no torchrun and is started as a plain process, at half the start-up time.
What was started is started again when it dies itself, and when torchrun has used up its tries although a checkpoint
was written since: `max_restarts` counts tries that got nowhere, with longer and longer pauses between them.

Two settings of the environment matter. With gloo, torchrun's ranks of a second life find the rendezvous store of the
first and read addresses of dead processes there: 6 of 10 restarts hung or failed. With
TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 each life has a store of its own. And OMP_NUM_THREADS must be set before torch
loads, or two ranks fight for every core.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import orjson

from gristmill.trainer.checkpoint import complete
from gristmill.trainer.config import (
    DONE_FILE,
    FAILED_FILE,
    LAUNCHER,
    LOG_FILE,
    RUN_FILE,
    SCORES_FILE,
    STOPPED_FILE,
    Run,
    TrainConfig,
    TrainError,
    pause,
)
from gristmill.trainer.fork import full_name
from gristmill.trainer.metrics import METRICS_FILE, Follower
from gristmill.trainer.score import Scores
from gristmill.trainer.trackers import require

POLL_S = 0.1
STOP_PATIENCE_S = 30.0  # after SIGTERM, for the last checkpoint
LOG_TAIL = 25  # lines in an error
# Exit codes of what was asked to stop before the ranks could see to it themselves: by a signal, or by `agent.py`.
ASKED = {code for number in (signal.SIGTERM, signal.SIGINT) for code in (-number, 128 + number)}
CHATTER = ("NOTE: Redirects are currently not supported", "[W", "W1", "*****", "Setting OMP_NUM_THREADS")

OnProgress = Callable[[dict[str, Any]], None]


@dataclass(frozen=True)
class Outcome:
    """How a run ended."""

    status: Literal["done", "stopped"]  # stopped: by a signal; the same command goes on
    out: Path
    done: dict[str, Any]  # done.json; empty when stopped
    scores: Scores | None


def finished(out: Path, key: str) -> Outcome | None:
    """The outcome in a folder, if it is complete and of this key."""
    try:
        done = orjson.loads((out / DONE_FILE).read_bytes())
        scores = Scores.load(out / SCORES_FILE)
    except (OSError, ValueError):
        return None
    return Outcome("done", out, done, scores) if done.get("key") == key == scores.key else None


def run(
    config: TrainConfig,
    mixture: str,
    tokens_folder: str,
    out: str,
    on_progress: OnProgress | None = None,
    key: str = "",
) -> Outcome:
    """Trains and scores one model. What the folder already has is continued.

    on_progress gets every line of metrics.jsonl once, as it is written; after a restart the steps that are done again
    come again. key is kept in run.json. Raises TrainError, with the end of the log, when the run fails for good. When
    interrupted, the ranks save and end before the exception goes on.
    """
    require(config.trackers)
    folder = Path(out)
    folder.mkdir(parents=True, exist_ok=True)
    for name in (FAILED_FILE, STOPPED_FILE, DONE_FILE):
        (folder / name).unlink(missing_ok=True)
    if config.init_from:
        config = config.model_copy(update={"init_from": full_name(config.init_from)})
    where = {name: str(Path(path).resolve()) for name, path in (("mixture", mixture), ("tokens", tokens_folder))}
    Run(config=config, **where, out=str(folder.resolve()), key=key).save(folder / RUN_FILE)
    follower = Follower(folder / METRICS_FILE)
    code = _see_through(config, folder, follower, on_progress)
    return _outcome(folder, code, config)


def _see_through(config: TrainConfig, folder: Path, follower: Follower, on_progress: OnProgress | None) -> int:
    """Starts the run until it ends by itself, or has died too often without a new checkpoint -> the last exit code."""
    tries = 0
    while True:
        before = _newest(folder)
        with _started(command(config, folder), folder, config) as process:
            while process.poll() is None:
                _report(follower, on_progress)
                time.sleep(POLL_S)
        _report(follower, on_progress)
        said = any((folder / name).exists() for name in (FAILED_FILE, STOPPED_FILE))
        if said or process.returncode == 0 or process.returncode in ASKED:
            return process.returncode
        # torchrun has tried `max_restarts` times before it ends with 1; a signal ended torchrun itself.
        spent = config.ranks > 1 and process.returncode > 0
        advanced = _newest(folder) != before
        tries = 0 if advanced else tries + (config.max_restarts + 1 if spent else 1)
        if tries > config.max_restarts or (not config.max_restarts):
            return process.returncode
        _note(folder, f"The process ended with {_ending(process.returncode)}; starting again.")
        time.sleep(pause(max(tries, 1)))


def _newest(folder: Path) -> str:
    found = complete(folder / "checkpoints")
    return found[-1].name if found else ""


def command(config: TrainConfig, folder: Path) -> list[str]:
    """What is started; also what to type to start a run by hand."""
    module = ["-m", "gristmill.trainer.train", "--config", str(folder / RUN_FILE)]
    if config.ranks == 1:
        return [sys.executable, *module]
    return [
        sys.executable,
        "-m",
        "gristmill.trainer.agent",
        "--nnodes=1",
        "--rdzv-backend=c10d",
        "--rdzv-endpoint=127.0.0.1:0",  # a free port; `--standalone` would look up the host's name
        "--local-addr=127.0.0.1",
        f"--nproc-per-node={config.ranks}",
        f"--max-restarts={config.max_restarts}",
        *module,
    ]


# glibc gives large blocks back to the kernel at once, and every step then faults their pages in anew: a third of the
# processor time of a small model on a CPU went there.
KEEP_MEMORY = {
    "MALLOC_MMAP_THRESHOLD_": str(1 << 30),
    "MALLOC_TRIM_THRESHOLD_": str(2 << 30),
    "MALLOC_TOP_PAD_": str(64 << 20),
}


def environment(config: TrainConfig) -> dict[str, str]:
    return {
        **KEEP_MEMORY,  # what the user has set wins
        **os.environ,
        "OMP_NUM_THREADS": str(config.threads),
        "MKL_NUM_THREADS": str(config.threads),
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
        "GLOO_SOCKET_IFNAME": _loopback(),
        "PYTHONUNBUFFERED": "1",
        LAUNCHER: str(os.getpid()),
    }


def _loopback() -> str:
    """The name of the loopback interface: lo on Linux, lo0 on macOS."""
    names = [name for _, name in socket.if_nameindex()]
    return next((name for name in ("lo", "lo0") if name in names), names[0])


@contextmanager
def _started(arguments: list[str], folder: Path, config: TrainConfig) -> Iterator[subprocess.Popen[bytes]]:
    """The process, with its output in the log. Whatever ends the block early asks it to stop, and waits."""
    with (folder / LOG_FILE).open("ab") as log:
        process = subprocess.Popen(
            arguments, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, env=environment(config)
        )
        try:
            yield process
        finally:
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)
                try:
                    process.wait(STOP_PATIENCE_S)
                except subprocess.TimeoutExpired:
                    process.kill()
                    process.wait()


def _report(follower: Follower, on_progress: OnProgress | None) -> None:
    for line in follower.new():
        if on_progress is not None:
            on_progress(line)


def _note(folder: Path, text: str) -> None:
    with (folder / LOG_FILE).open("a") as log:
        log.write(text + "\n")


def _ending(code: int) -> str:
    return f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"


def _outcome(folder: Path, code: int, config: TrainConfig) -> Outcome:
    failed = folder / FAILED_FILE
    if failed.exists():
        raise TrainError(orjson.loads(failed.read_bytes())["message"])
    try:
        done = orjson.loads((folder / DONE_FILE).read_bytes())
    except FileNotFoundError:
        if code in ASKED or (folder / STOPPED_FILE).exists():
            return Outcome("stopped", folder, {}, None)
        raise TrainError(
            f"{folder}: training ended with {_ending(code)} and was started again at most {config.max_restarts} times. "
            f"The same command goes on from the last checkpoint. The end of {folder / LOG_FILE}:\n{_tail(folder)}"
        ) from None
    return Outcome("done", folder, done, Scores.load(folder / SCORES_FILE))


def _tail(folder: Path) -> str:
    """The last lines of the log, without torchrun's own remarks."""
    text = (folder / LOG_FILE).read_text("utf-8", errors="replace")
    lines = [line for line in text.splitlines() if line.strip() and not line.startswith(CHATTER)]
    return "\n".join(lines[-LOG_TAIL:])
