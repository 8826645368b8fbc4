"""The one engine: where the work of a run is done. The only module that knows Dask.

`engine.run(function, orders, done)` calls `done(position, result)` as pieces end and gives back what failed. The
scheduler holds a few pieces a worker at a time, however many there are, or `at_once` of them altogether; a piece that
fails for the storage's sake is tried again; a piece that kills its worker three times is given up with its error, and
the rest goes on.
"""

from __future__ import annotations

import importlib.metadata
import logging
import os
import platform
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

from gristmill.stages.stores import passing

Done = Callable[[int, Any], None]

TRIES = 3  # for errors of the storage; faults of the data are the same every time
WINDOW = 3  # pieces a worker that the scheduler holds
COMPARED = ("gristmill", "pyarrow", "numpy", "numba", "distributed", "fsspec")


class EngineError(RuntimeError):
    """The cluster cannot do the work; the message says why."""


@dataclass(frozen=True)
class Failure:
    """A piece that was given up."""

    position: int
    error: str


class Engine(Protocol):
    @property
    def workers(self) -> int: ...

    @property
    def dashboard(self) -> str | None: ...

    def run(
        self, function: Callable[[Any], Any], orders: Sequence[Any], done: Done, at_once: int | None = None
    ) -> list[Failure]: ...


class InProcess:
    """Does everything here and now: for debuggers and small inputs."""

    workers = 1
    dashboard = None

    def run(
        self, function: Callable[[Any], Any], orders: Sequence[Any], done: Done, at_once: int | None = None
    ) -> list[Failure]:
        failures = []
        for position, order in enumerate(orders):
            for attempt in range(1, TRIES + 1):
                try:
                    done(position, function(order))
                    break
                except Exception as error:
                    if passing(error) and attempt < TRIES:
                        continue
                    if not passing(error) and not isinstance(
                        error, OSError | ValueError | RuntimeError | AssertionError
                    ):
                        raise
                    failures.append(Failure(position, _say(error)))
                    break
        return failures


class OnDask:
    """Does the work on the workers of a Dask cluster."""

    def __init__(self, client: Any) -> None:
        self._client = client
        self.dashboard = str(client.dashboard_link) if client.dashboard_link else None

    @property
    def workers(self) -> int:
        return max(1, sum(self._client.nthreads().values()))

    def run(
        self, function: Callable[[Any], Any], orders: Sequence[Any], done: Done, at_once: int | None = None
    ) -> list[Failure]:
        from distributed import as_completed

        failures: list[Failure] = []
        waiting = iter(range(len(orders)))
        tries = [0] * len(orders)
        flying: dict[Any, int] = {}
        completed = as_completed([])

        def submit(position: int) -> None:
            tries[position] += 1
            future = self._client.submit(function, orders[position], pure=False)
            flying[future] = position
            completed.add(future)

        for _ in range(at_once or WINDOW * self.workers):
            if (position := next(waiting, None)) is not None:
                submit(position)
        for future in completed:
            position = flying.pop(future)
            if future.status == "finished":
                done(position, future.result())
            else:
                error = future.exception()
                lost = future.status == "cancelled"
                if (passing(error) or lost) and tries[position] < TRIES:
                    submit(position)
                    continue
                failures.append(Failure(position, _say(error)))
            future.release()
            if (position := next(waiting, None)) is not None:
                submit(position)
        return failures


def _say(error: BaseException | None) -> str:
    if error is None:
        return "was cancelled by the scheduler"
    if type(error).__name__ == "KilledWorker":
        return f"killed its worker {TRIES} times, out of memory perhaps: {error}"
    return f"{type(error).__name__}: {error}"


@contextmanager
def open_engine(
    *, debug: bool = False, workers: int | None = None, scheduler: str | None = None, connect_s: float = 15.0
) -> Iterator[Engine]:
    """In-process, a cluster of this machine's processes (default), or a running scheduler.

    workers: processes of one thread each; one a core where not given. Raises EngineError when the scheduler does not
    answer or its workers run other versions of the packages.
    """
    if debug:
        yield InProcess()
        return
    import dask
    from distributed import Client, LocalCluster

    dask.config.set({"distributed.scheduler.allowed-failures": TRIES, "distributed.admin.log-format": "%(message)s"})
    logging.getLogger("distributed").setLevel(logging.CRITICAL)
    if scheduler is not None:
        try:
            client = Client(scheduler, timeout=connect_s)
        except (OSError, TimeoutError) as error:
            raise EngineError(
                f"No Dask scheduler answers at {scheduler}: {error}. Start one with `dask scheduler` and at least one "
                f"`dask worker {scheduler}`."
            ) from error
        with client:
            _compare_versions(client, scheduler)
            yield OnDask(client)
        return
    count = workers or os.cpu_count() or 1
    cluster = LocalCluster(
        n_workers=count,
        threads_per_worker=1,
        processes=True,
        host="127.0.0.1",
        dashboard_address="127.0.0.1:0",
        silence_logs=logging.CRITICAL,
    )
    with cluster, Client(cluster) as client:
        yield OnDask(client)


def here() -> dict[str, str]:
    """What must be the same on the driver and on every worker."""
    found = {name: importlib.metadata.version(name) for name in COMPARED}
    return {"python": ".".join(platform.python_version_tuple()[:2]), **found}


def _compare_versions(client: Any, scheduler: str) -> None:
    client.wait_for_workers(1, timeout=60)
    mine = here()
    for worker, theirs in client.run(here, on_error="return").items():
        if isinstance(theirs, BaseException):
            raise EngineError(f"Worker {worker} of {scheduler} cannot import gristmill: {theirs}. Install it there.")
        different = {name: (mine[name], theirs[name]) for name in mine if mine[name] != theirs.get(name)}
        if different:
            listed = ", ".join(f"{name} {a} here, {b} there" for name, (a, b) in different.items())
            raise EngineError(f"Worker {worker} of {scheduler} runs other versions: {listed}. Install the same ones.")
