"""The one engine: where the work of a run is done. With `connect.py`, all that knows Dask.

`engine.run(function, orders, done)` calls `done(position, result)` as pieces end and gives back what failed. The
scheduler holds a few pieces a worker at a time, however many there are, or `at_once` of them altogether. A piece that
fails for the storage's sake is tried again; a full disk ends the work. A piece that kills its worker is tried again in
a child process that may die (`isolation.py`), and given up with its error when that does not help; the rest goes on.
Near the end, when workers are idle, a piece that takes much longer than the others is begun a second time on another
worker, and the first to end counts: both write the same bytes.
"""

from __future__ import annotations

import math
import os
import queue
import statistics
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

from gristmill.pipelines.cluster_file import ClusterSettings
from gristmill.pipelines.connect import Troubles, connected, local, offering, running_scheduler
from gristmill.pipelines.faults import LASTING
from gristmill.pipelines.isolation import TIMEOUT_S, Limits, SetAside, isolated, watched
from gristmill.pipelines.poison import StageFault
from gristmill.pipelines.steady_clock import keep_steady
from gristmill.pipelines.worker_check import FOUND_IN_S, EngineError, compare_workers, unfit
from gristmill.stages.stores import passing

__all__ = ["PLAIN", "Care", "Engine", "EngineError", "Failure", "InProcess", "OnDask", "Running", "open_engine"]

Done = Callable[[int, Any], None]

TRIES = 3  # for errors of the storage; faults of the data are the same every time
PAUSES_S = (0.5, 2.0)  # before the second and the third try
KILLS = 3  # of a worker by one piece
WINDOW = 3  # pieces a worker that the scheduler holds
STRAGGLER_S = 30.0  # a piece that takes less is not begun twice
STRAGGLER_MEDIANS = 2.0  # nor one that takes less than this many times the median of the others
ASKED_EVERY_S = 2.0  # which workers there are
MEMORY_SHARE = 0.95  # of a worker's memory for a child: where Dask ends a worker


@dataclass(frozen=True)
class Failure:
    """A piece that was given up."""

    position: int
    error: str
    kind: str = "error"  # "storage": no piece can be done; "killed", "fault": the piece is set aside; "error"
    stage: str = ""
    log: str = ""  # the last words of the process that it killed
    attempts: int = 1


@dataclass(frozen=True)
class Care:
    """How an engine treats the pieces of one kind."""

    guarded: bool = False  # the function asks a `Guard`: documents that kill are found, and a step has a time limit
    at_once: int | None = None  # pieces in all that the scheduler may hold; None: a few a worker
    resources: Mapping[str, float] = field(default_factory=dict)  # what a piece takes of its worker, by name
    copy: Callable[[Any], Any] | None = None  # the order for a second attempt beside the first; None: never


PLAIN = Care()


@dataclass(frozen=True)
class Running:
    """A piece that is worked on."""

    position: int
    seconds: float
    worker: str = ""


class Engine(Protocol):
    @property
    def workers(self) -> int: ...

    @property
    def dashboard(self) -> str | None: ...

    @property
    def cut_short(self) -> int: ...

    @property
    def tried_again(self) -> int: ...  # attempts at pieces that had failed before

    def run(
        self, function: Callable[[Any], Any], orders: Sequence[Any], done: Done, care: Care = ...
    ) -> list[Failure]: ...

    def running(self) -> list[Running]: ...


def _is_transient(error: BaseException | None) -> bool:
    return passing(error) and not (isinstance(error, OSError) and error.errno in LASTING)


def _failure(position: int, error: BaseException | None, attempts: int) -> Failure:
    """What a run is told of an error that is not tried again."""
    if isinstance(error, SetAside):
        return Failure(position, str(error), "killed", error.stage, error.log, error.attempts)
    if isinstance(error, StageFault):
        return Failure(position, str(error), "fault", error.stage, attempts=attempts)
    if error is None or type(error).__name__ == "KilledWorker":
        why = f"killed its worker {attempts} times, out of memory perhaps" + (f": {error}" if error else "")
        return Failure(position, why, "killed", attempts=attempts)
    kind = "storage" if isinstance(error, OSError) and error.errno in LASTING else "error"
    return Failure(position, f"{type(error).__name__}: {error}", kind, attempts=attempts)


class InProcess:
    """Does everything here and now: for debuggers and small inputs."""

    workers = 1
    dashboard = None
    cut_short = tried_again = 0

    def __init__(self, pause: Callable[[float], None] = time.sleep) -> None:
        self._pause = pause
        self._now: tuple[int, float] | None = None  # position, when it began

    def running(self) -> list[Running]:
        now = self._now
        return [] if now is None else [Running(now[0], time.monotonic() - now[1])]

    def run(
        self, function: Callable[[Any], Any], orders: Sequence[Any], done: Done, care: Care = PLAIN
    ) -> list[Failure]:
        failures = []
        for position, order in enumerate(orders):
            self._now = position, time.monotonic()
            failure = self._one(function, position, order, done)
            if failure is not None:
                failures.append(failure)
                if failure.kind == "storage":
                    break
        self._now = None
        return failures

    def _one(self, function: Callable[[Any], Any], position: int, order: Any, done: Done) -> Failure | None:
        for attempt in range(1, TRIES + 1):
            try:
                result = function(order)
            except Exception as error:
                transient = _is_transient(error)
                if not transient and not isinstance(error, OSError | ValueError | RuntimeError | AssertionError):
                    raise
                if not transient or attempt == TRIES:
                    return _failure(position, error, attempt)
                self._pause(PAUSES_S[attempt - 1])
                self.tried_again += 1
            else:
                done(position, result)
                return None
        return None


class OnDask:
    """Does the work on the workers of a Dask cluster."""

    def __init__(
        self,
        client: Any,
        *,
        timeout_s: float = TIMEOUT_S,
        straggler_s: float = STRAGGLER_S,
        pauses_s: Sequence[float] = PAUSES_S,
        at_most: int = 0,
        out: str | None = None,
        wait_s: float = FOUND_IN_S,
        say: Callable[[str], None] = lambda _: None,
        troubles: Troubles | None = None,
    ) -> None:
        """at_most: workers that there may be later. out: the run folder, where workers that join later are asked
        whether they can do the work. wait_s: for a worker that offers what a piece takes."""
        self._client = client
        self._out, self.wait_s, self.say, self._troubles = out, wait_s, say, troubles
        self._at_most, self._known = at_most, set(client.nthreads())
        self._alone_since: float | None = None  # no worker is there since then
        self.dashboard = str(client.dashboard_link) if client.dashboard_link else None
        self.timeout_s, self.straggler_s, self.pauses_s = timeout_s, straggler_s, pauses_s
        self.cut_short = 0  # attempts that may have left half-written files: killed, or overtaken
        self.tried_again = 0
        self._current: _Pass | None = None

    @property
    def workers(self) -> int:
        return max(1, sum(self._client.nthreads().values()))

    @property
    def width(self) -> int:
        """Workers that there are or may be: a cluster that adapts grows only when it sees work."""
        return max(self.workers, self._at_most)

    def running(self) -> list[Running]:
        return [] if self._current is None else self._current.running()

    def look(self) -> None:
        """Asks workers that joined whether they can do the work, and says when there are none."""
        there = set(self._client.nthreads())
        if self._out is not None and (new := there - self._known):
            bad = unfit(self._client, sorted(new), self._out)
            for problem in bad.values():
                self.say(f"Not used: {problem}")
            if bad:
                self._client.retire_workers(workers=list(bad), close_workers=True, remove=True)
        self._known = there
        now = time.monotonic()
        if there:
            self._alone_since = None
        elif self._alone_since is None:
            self._alone_since = now
        elif now - self._alone_since > self.wait_s:
            self._alone_since = now
            trouble = self._troubles.last() if self._troubles is not None else ""
            self.say(f"No worker is there since {self.wait_s:.0f} s; the run waits for one to come.{trouble}")

    def run(
        self, function: Callable[[Any], Any], orders: Sequence[Any], done: Done, care: Care = PLAIN
    ) -> list[Failure]:
        self._current = _Pass(self, self._client, function, orders, done, care)
        try:
            return self._current.run()
        finally:
            self._current = None


@dataclass
class _Piece:
    """What is known of one piece that is not done yet."""

    position: int
    tries: int = 0
    kills: int = 0
    submitted: float = 0.0
    started: float | None = None  # about: when it was among the oldest that workers have room for
    futures: list[Any] = field(default_factory=list)
    copied: bool = False


class _Pass:
    """One call of `run`."""

    def __init__(
        self,
        engine: OnDask,
        client: Any,
        function: Callable[[Any], Any],
        orders: Sequence[Any],
        done: Done,
        care: Care,
    ) -> None:
        self._engine, self._client, self._function, self._orders = engine, client, function, orders
        self._done, self._care = done, care
        self._waiting = iter(range(len(orders)))
        self._again: deque[tuple[float, _Piece]] = deque()  # not before, piece
        self._flying: dict[int, _Piece] = {}  # in the order of submission
        self._ended: queue.SimpleQueue[tuple[_Piece, Any]] = queue.SimpleQueue()
        self._seconds: list[float] = []  # that pieces took
        self._failures: list[Failure] = []
        self._workers, self._width, self._asked = engine.workers, engine.width, time.monotonic()
        self._unserved: float | None = time.monotonic() if care.resources else None
        self._all_submitted = False

    def running(self) -> list[Running]:
        now = time.monotonic()
        pieces = [piece for piece in list(self._flying.values()) if piece.started is not None]
        return [Running(piece.position, now - (piece.started or now)) for piece in pieces]

    def run(self) -> list[Failure]:
        self._fill()
        while self._flying or self._again:
            try:
                piece, future = self._ended.get(timeout=0.5)
            except queue.Empty:
                self._look()
            else:
                if piece.position in self._flying and future in piece.futures:
                    self._take(piece, future)
            self._refresh()
            if any(failure.kind == "storage" for failure in self._failures):
                self._client.cancel([future for piece in self._flying.values() for future in piece.futures])
                break
            self._fill()
        return self._failures

    def _fill(self) -> None:
        now = time.monotonic()
        while self._again and self._again[0][0] <= now:
            self._submit(self._again.popleft()[1])
        while not self._all_submitted and len(self._flying) < (self._care.at_once or WINDOW * self._width):
            position = next(self._waiting, None)
            if position is None:
                self._all_submitted = True
                break
            self._submit(_Piece(position))
        for piece in list(self._flying.values())[: self._workers]:
            piece.started = piece.started or now

    def _submit(self, piece: _Piece, order: Any = None, **where: Any) -> None:
        self._engine.tried_again += order is None and piece.kills + piece.tries > 0
        order = self._orders[piece.position] if order is None else order
        piece.submitted = time.monotonic()
        if self._care.resources:
            where["resources"] = dict(self._care.resources)
        if piece.kills:
            timeout_s = self._engine.timeout_s if self._care.guarded else math.inf
            future = self._client.submit(in_child, self._function, order, timeout_s, pure=False, **where)
        else:
            timeout_s = self._engine.timeout_s
            future = self._client.submit(watched, self._function, order, timeout_s, pure=False, **where)
        piece.futures.append(future)
        self._flying[piece.position] = piece
        future.add_done_callback(lambda ended: self._ended.put((piece, ended)))

    def _take(self, piece: _Piece, future: Any) -> None:
        if future.status == "finished":
            result = future.result()
            self._land(piece)
            self._seconds.append(time.monotonic() - (piece.started or piece.submitted))
            self._done(piece.position, result)
            return
        lost = future.status == "cancelled"
        error = None if lost else future.exception()
        if future is not piece.futures[0]:  # the copy failed, for example with its worker: the first is at work
            piece.futures.remove(future)
            future.release()
            return
        self._land(piece)
        if lost or type(error).__name__ == "KilledWorker":
            piece.kills += 1
            self._engine.cut_short += 1
            if piece.kills < KILLS:
                self._again.append((0.0, piece))
                return
        elif _is_transient(error):
            piece.tries += 1
            if piece.tries < TRIES:
                pauses = self._engine.pauses_s
                self._again.append((time.monotonic() + pauses[min(piece.tries, len(pauses)) - 1], piece))
                return
        self._failures.append(_failure(piece.position, error, max(piece.kills, piece.tries, 1)))

    def _land(self, piece: _Piece) -> None:
        """Takes a piece out of the air, copies and all."""
        del self._flying[piece.position]
        if len(piece.futures) > 1:
            self._client.cancel(piece.futures)
        for future in piece.futures:
            future.release()
        piece.futures, piece.started, piece.copied = [], None, False

    def _look(self) -> None:
        """What is done when nothing ends for a while."""
        if self._client.status not in ("running", "connecting"):
            raise EngineError(
                "The connection to the scheduler is lost. What is done stays: start the scheduler and its workers, "
                "and run the same command again."
            )
        now = time.monotonic()
        if self._care.copy is None or not self._all_submitted or self._again or len(self._flying) >= self._workers:
            return
        for piece in straggling(self._flying.values(), self._seconds, now, self._engine.straggler_s):
            self._copy(piece)

    def _refresh(self) -> None:
        """Every two seconds: which workers there are now, and whether one of them can take the pieces."""
        now = time.monotonic()
        if now - self._asked <= ASKED_EVERY_S:
            return
        self._engine.look()
        self._workers, self._width, self._asked = self._engine.workers, self._engine.width, now
        if self._unserved is None:
            return
        workers = self._client.scheduler_info(n_workers=-1)["workers"]
        if offering(workers, self._care.resources):
            self._unserved = None
        elif now - self._unserved > self._engine.wait_s:
            offers = sorted({str(one.get("resources") or "nothing") for one in workers.values()})
            raise EngineError(
                f"No worker offers {dict(self._care.resources)}, which this work takes by the file of --cluster, since "
                f"{self._engine.wait_s:.0f} s. Workers offer: {', '.join(offers) or 'there are none'}. Start some with "
                '`dask worker --resources "NAME=AMOUNT"`, or take the name out of `resources`.'
            )

    def _copy(self, piece: _Piece) -> None:
        """Begins a piece a second time, on another worker than the first."""
        assert self._care.copy is not None
        key = piece.futures[0].key
        at = {worker for worker, keys in self._client.processing().items() if key in keys}
        others = [worker for worker in self._client.nthreads() if worker not in at]
        if not at or not others:
            return
        piece.copied = True
        self._engine.cut_short += 1
        self._submit(piece, self._care.copy(self._orders[piece.position]), workers=others)


def in_child(function: Callable[[Any], Any], order: Any, timeout_s: float) -> Any:
    """On a worker: the function on the order in a child process, which may use what the worker may."""
    from distributed import get_worker

    limit = get_worker().memory_manager.memory_limit
    return isolated(function, order, Limits(timeout_s, int(limit * MEMORY_SHARE) if limit else None))


def straggling(pieces: Any, seconds: Sequence[float], now: float, least_s: float) -> list[Any]:
    """The pieces that take much longer than those that ended. now: on the clock of `started`."""
    if not seconds:
        return []
    bound = max(least_s, STRAGGLER_MEDIANS * statistics.median(seconds))
    return [p for p in pieces if p.started is not None and not p.copied and now - p.started > bound]


@contextmanager
def open_engine(
    *,
    debug: bool = False,
    workers: int | None = None,
    scheduler: str | None = None,
    cluster: ClusterSettings | None = None,
    connect_s: float = 15.0,
    timeout_s: float = TIMEOUT_S,
    out: str | None = None,
    say: Callable[[str], None] = lambda _: None,
) -> Iterator[Engine]:
    """In-process, a cluster of this machine's processes (default), a running scheduler, or a cluster of a file.

    workers: processes of one thread each; one a core where not given. timeout_s: for one batch in one stage. out: the
    run folder, which workers of other machines must see. say: told of workers that come and cannot do the work.
    Raises EngineError when the scheduler does not answer, no worker comes, they run other versions of the packages, or
    do not see the same storage.
    """
    if debug:
        yield InProcess()
        return
    keep_steady()
    with ExitStack() as stack:
        if scheduler is None and cluster is None:
            client = stack.enter_context(local(workers or os.cpu_count() or 1))
            yield OnDask(client, timeout_s=timeout_s)
            return
        settings = cluster or running_scheduler(str(scheduler))
        troubles = stack.enter_context(Troubles())
        client = stack.enter_context(connected(settings, troubles, connect_s))
        compare_workers(client, settings.scheduler or str(settings.cls), out, settings.workers_within_s)
        troubles.said.clear()
        yield OnDask(
            client,
            timeout_s=timeout_s,
            at_most=settings.adapt.maximum if settings.adapt else 0,
            out=out,
            wait_s=settings.workers_within_s,
            say=say,
            troubles=troubles,
        )
