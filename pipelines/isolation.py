"""Works on a shard in a child process that may die: finds the documents that kill it, and goes on without them.

A worker that dies takes its own memory of what it did along. So the second attempt at a shard that killed its worker
runs in a child. Before every step the child notes in a small file what goes into which stage; when it dies, is too
large, or makes no progress, the note says where. That range of the batch is cut in pieces for the next child, until
one document is left: it is `poison`. A batch that only together was too much passes in pieces, and nothing is lost.

`watched` is the first attempt, inside the worker: a step without an end ends the process, and the driver sends the
shard here.
"""

from __future__ import annotations

import contextlib
import faulthandler
import importlib
import math
import os
import pickle
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, Any

import orjson
import psutil

from gristmill.pipelines.poison import (
    MAX_POISON,
    READ,
    REMOVALS,
    WATCH,
    WRITE,
    Poisoned,
    cut_of,
    load,
    path_of,
    save,
)

KILLS = 2  # of a step without documents to tell apart, after the one of the worker that brought the shard here
TIMEOUT_S = 1800.0  # for one batch in one stage, at most 8,192 documents: 0.2 s a document
_NOTE_BYTES = 8192
_LOG_BYTES = 8192  # of a dead child's last words


class SetAside(RuntimeError):
    """A shard keeps killing the process that works on it."""

    def __init__(self, stage: str, error: str, log: str, attempts: int) -> None:
        super().__init__(stage, error, log, attempts)
        self.stage, self.error, self.log, self.attempts = stage, error, log, attempts

    def __str__(self) -> str:
        return f"stage {self.stage}: {self.error}"


@dataclass(frozen=True)
class Limits:
    """What a child may use."""

    timeout_s: float = TIMEOUT_S  # without progress
    memory_bytes: int | None = None
    piece_s: float | None = None  # without progress, for a piece of a batch; None: an eighth, and at least a minute


# In the worker


class _Alarm:
    """Ends the process when a step has no end. The timer is in C: it rings while the interpreter is stuck, too.

    One timer a process: a worker of several threads is ended when none of them makes progress. Each start of the timer
    makes a thread, half a millisecond with small steps: it is left running for a share of the limit, which it has more.
    """

    _active = 0
    _started = -math.inf  # seconds of `time.monotonic`
    _lock = threading.Lock()
    _sink: IO[str] | None = None

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s

    def step(self, batch: int, stage: str, first: int, stop: int, doc_id: str) -> None:
        if _Alarm._sink is None:
            _Alarm._sink = open(os.devnull, "w")  # noqa: SIM115  the timer keeps it for good
        now, slack = time.monotonic(), self._timeout_s / 32
        if now - _Alarm._started > slack:
            _Alarm._started = now
            faulthandler.dump_traceback_later(self._timeout_s + slack, exit=True, file=_Alarm._sink)

    def edges(self, batch: int, stage: str) -> Sequence[int] | None:
        return None

    def __enter__(self) -> _Alarm:
        with _Alarm._lock:
            _Alarm._active += 1
        return self

    def __exit__(self, *_: object) -> None:
        with _Alarm._lock:
            _Alarm._active -= 1
            if not _Alarm._active:
                _Alarm._started = -math.inf
                faulthandler.cancel_dump_traceback_later()


def in_own_child() -> bool:
    """True in a child process that a worker began for one piece that kills."""
    return isinstance(WATCH.get(), _Notes)


def watched(function: Callable[[Any], Any], order: Any, timeout_s: float) -> Any:
    """The function on the order, in a process that ends when a step takes longer than `timeout_s`."""
    with _Alarm(timeout_s) as alarm:
        token = WATCH.set(alarm)
        try:
            return function(order)
        finally:
            WATCH.reset(token)


# In the parent


@dataclass(frozen=True)
class _Death:
    """What is known of a child that did not come to its end."""

    how: str
    batch: int
    stage: str
    first: int
    stop: int
    doc_id: str
    log: str


def isolated(function: Callable[[Any], Any], order: Any, limits: Limits) -> Any:
    """The function on the order, in children, without the documents that kill them -> its result.

    What the function raises is raised. Raises SetAside when it is not a few documents that kill.
    """
    path = ""
    if hasattr(order, "poison"):  # else the function has no guard, and is only tried where it does no harm
        path = path_of(order)
        order = replace(order, poison=tuple(dict.fromkeys([*order.poison, *load(path, [order.key])])))
    edges: dict[tuple[int, str], list[int]] = {}
    elsewhere = attempts = 0
    while True:
        attempts += 1
        outcome = _child(function, order, edges, limits)
        if not isinstance(outcome, _Death):
            return outcome[0]
        found = None
        if outcome.stage == REMOVALS:
            found = Poisoned("", REMOVALS, outcome.how, order.key, outcome.batch)
        elif outcome.stage in (READ, WRITE, ""):
            elsewhere += 1
        elif outcome.doc_id:
            found = Poisoned(outcome.doc_id, outcome.stage, outcome.how, order.key)
        elif outcome.stop - outcome.first > 1:
            _cut(edges, outcome)
        else:  # no document is left in the piece, and still it dies
            elsewhere += 1
        too_many = found is not None and len(order.poison) >= MAX_POISON
        if elsewhere >= KILLS or too_many:
            more = f"; more than {MAX_POISON} documents do this" if too_many else ""
            raise SetAside(outcome.stage or "start", f"the process {outcome.how}{more}", outcome.log, attempts + 1)
        if found is not None:
            order = replace(order, poison=(*order.poison, found))
            save(path, [found])


def _cut(edges: dict[tuple[int, str], list[int]], death: _Death) -> None:
    """Cuts the range that killed into pieces."""
    place = death.batch, death.stage
    edges[place] = cut_of(edges.get(place, ()), death.first, death.stop)


def _child(
    function: Callable[[Any], Any], order: Any, edges: dict[tuple[int, str], list[int]], limits: Limits
) -> tuple[Any] | _Death:
    """One child -> (its result,), or how it died. Raises what it raised."""
    with tempfile.TemporaryDirectory(prefix="gristmill-child-") as scratch:
        note = Path(scratch, "note")
        note.write_bytes(b"")
        with Path(scratch, "log").open("w+b") as log:
            process = subprocess.Popen(
                [sys.executable, "-c", "from gristmill.pipelines.isolation import child; child()"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env={**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
            )
            assert process.stdin is not None
            assert process.stdout is not None
            answer: list[bytes] = []
            reader = threading.Thread(target=lambda: answer.append(process.stdout.read()), daemon=True)  # type: ignore[union-attr]
            reader.start()
            try:
                with contextlib.suppress(BrokenPipeError):
                    job = (function.__module__, function.__qualname__, order, edges, str(note))
                    pickle.dump(job, process.stdin)
                    process.stdin.flush()
                how = _wait(process, note, limits)
            finally:
                process.kill()
                process.wait()
                with contextlib.suppress(BrokenPipeError):
                    process.stdin.close()
                reader.join()
                process.stdout.close()
            if not how and answer[0]:
                kind, value = pickle.loads(answer[0])  # noqa: S301  from our own child
                if kind == "raised":
                    raise value
                return (value,)
            log.seek(max(0, log.seek(0, os.SEEK_END) - _LOG_BYTES))
            said = log.read().decode("utf-8", "replace")
        last = _noted(note)
        return _Death(how or _ended(process.returncode), *last, log=said)


def _wait(process: subprocess.Popen[bytes], note: Path, limits: Limits) -> str:
    """Waits for a child's end -> why it was ended, "" when it ended by itself."""
    seen, since = b"", time.monotonic()
    watched_process = psutil.Process(process.pid)
    while True:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(0.05)
            return ""
        now = note.read_bytes()
        if now != seen:
            seen, since = now, time.monotonic()
        with contextlib.suppress(psutil.NoSuchProcess):
            used = watched_process.memory_info().rss
            if limits.memory_bytes is not None and used > limits.memory_bytes:
                return f"used more than its {limits.memory_bytes / 1e9:.2f} GB of memory"
        bound = _bound(seen, limits)
        if time.monotonic() - since > bound:
            process.send_signal(signal.SIGUSR1)  # its stack, into the log
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(0.5)
            return f"made no progress for {bound:.0f} s"


def _bound(note: bytes, limits: Limits) -> float:
    """Seconds that a step may take: a piece of a batch less than a batch, but time enough to load a kernel."""
    try:
        is_piece = bool(orjson.loads(note)[-1])
    except orjson.JSONDecodeError:  # nothing yet, or read while it was written
        is_piece = False
    if not is_piece:
        return limits.timeout_s
    return limits.piece_s or max(limits.timeout_s / 8, min(limits.timeout_s, 60.0))


def _noted(note: Path) -> tuple[int, str, int, int, str]:
    data = note.read_bytes()
    if not data:
        return -1, "", 0, 0, ""
    _, batch, stage, first, stop, doc_id, _ = orjson.loads(data)
    return batch, stage, first, stop, doc_id


def _ended(code: int | None) -> str:
    if code is not None and code < 0:
        name = signal.Signals(-code).name
        return f"was killed by {name}" + (", out of memory perhaps" if name == "SIGKILL" else "")
    return f"ended with exit code {code}"


# In the child


class _Notes:
    """Notes each step in a file, which outlives the process."""

    def __init__(self, path: str, edges: dict[tuple[int, str], list[int]]) -> None:
        self._file = os.open(path, os.O_WRONLY)
        self._edges = edges
        self._count = 0

    def step(self, batch: int, stage: str, first: int, stop: int, doc_id: str) -> None:
        self._count += 1
        is_piece = (batch, stage) in self._edges
        entry = orjson.dumps([self._count, batch, stage, first, stop, doc_id[:1000], is_piece])
        os.pwrite(self._file, entry.ljust(_NOTE_BYTES), 0)

    def edges(self, batch: int, stage: str) -> Sequence[int] | None:
        return self._edges.get((batch, stage))


def child() -> None:
    """The child's whole life: a job on standard input, its answer on standard output."""
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    with _answering() as answer:
        module, name, order, edges, note = pickle.load(sys.stdin.buffer)  # noqa: S301  from our own parent
        threading.Thread(target=_die_with_parent, daemon=True).start()
        WATCH.set(_Notes(note, edges))
        try:
            value = ("done", getattr(importlib.import_module(module), name)(order))
        except Exception as error:
            value = ("raised", error)
        try:
            data = pickle.dumps(value)
            pickle.loads(data)  # noqa: S301  made one line above
        except Exception:  # an error of others that does not pass: its text does
            data = pickle.dumps(("raised", RuntimeError(f"{type(value[1]).__name__}: {value[1]}")))
        answer.write(data)
    os._exit(0)  # the thread that waits for the parent would hold the interpreter


@contextlib.contextmanager
def _answering() -> Iterator[IO[bytes]]:
    """Standard output for the answer alone: what libraries print goes to the log."""
    with os.fdopen(os.dup(1), "wb") as answer:
        os.dup2(2, 1)
        yield answer


def _die_with_parent() -> None:
    sys.stdin.buffer.read()  # ends when the parent does
    os._exit(1)
