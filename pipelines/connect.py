"""Dask's side of the engine: a cluster of this machine, a running scheduler, or a cluster that is started here."""

from __future__ import annotations

import gc
import logging
import shutil
import time
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

from gristmill.pipelines.cluster_file import ClusterSettings, class_of
from gristmill.pipelines.worker_check import FOUND_IN_S, EngineError

START_S = 120.0  # for the scheduler of a new cluster, in a pod or here


def running_scheduler(address: str) -> ClusterSettings:
    """The settings of `--scheduler` alone."""
    return ClusterSettings.model_validate({"scheduler": address, "workers_within_s": FOUND_IN_S})


@contextmanager
def connected(settings: ClusterSettings, troubles: Troubles, connect_s: float) -> Iterator[Any]:
    """A client of the cluster that the settings start or name, with a worker at least where it is started here."""
    _quiet()
    if settings.cls is None:
        with _client(settings.scheduler, settings, connect_s) as client:
            yield client
        return
    with started(settings, troubles) as cluster, _client(cluster, settings, START_S) as client:
        wait_for_worker(client, settings, cluster, troubles)
        yield client


def _quiet() -> None:
    import dask

    # A worker's death counts for every piece that it held, so the driver counts for itself.
    dask.config.set({"distributed.scheduler.allowed-failures": 0, "distributed.admin.log-format": "%(message)s"})
    logging.getLogger("distributed").setLevel(logging.CRITICAL)


class Troubles(logging.Handler):
    """What goes wrong while workers are asked for: Dask writes it to its logs alone."""

    SOURCES = ("tornado.application", "asyncio", "distributed.deploy")

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.said: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        error = record.exc_info[1] if record.exc_info else None
        if error is not None:
            self.said.append(f"{type(error).__name__}: {' '.join(str(error).split())}"[:600])

    def last(self) -> str:
        """For the end of a message; "" where nothing went wrong."""
        return f" The last error of the cluster: {self.said[-1]}." if self.said else ""

    def __enter__(self) -> Troubles:
        for name in self.SOURCES:
            logger = logging.getLogger(name)
            for other in list(logger.handlers):  # Dask puts one that prints there
                logger.removeHandler(other)
            logger.addHandler(self)
            logger.setLevel(logging.ERROR)
            logger.propagate = False
        return self

    def __exit__(self, *_: object) -> None:
        """Goes on in silence: Dask and its loop tell the same errors again when the program ends."""
        for name in self.SOURCES:
            logging.getLogger(name).removeHandler(self)
            logging.getLogger(name).addHandler(logging.NullHandler())


@contextmanager
def started(settings: ClusterSettings, troubles: Troubles) -> Iterator[Any]:
    """The cluster of a file, asked for its workers. Raises EngineError when it cannot be started."""
    assert settings.cls is not None
    cls = class_of(settings.cls, "--cluster")
    _check_queue(cls, settings.cls)
    arguments: dict[str, Any] = dict(settings.arguments)
    if settings.tls is not None:
        arguments["security"] = settings.tls.security()
        arguments.setdefault("protocol", "tls://")
    wrong = ""
    try:
        cluster = cls(**arguments)
    except Exception as error:  # whatever a cluster of others raises, its start is what failed
        wrong = f"{type(error).__name__}: {' '.join(str(error).split()).strip('.')[:1000]}"
    if wrong:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ResourceWarning)
            gc.collect()  # the half of it that was made, which says at its end that nobody closed it
        raise EngineError(
            f"{settings.cls} could not be started: {wrong}. See its `arguments` in the file of --cluster."
        )
    try:
        if settings.adapt is not None:
            cluster.adapt(minimum=settings.adapt.minimum, maximum=settings.adapt.maximum)
        elif settings.scale is not None:
            cluster.scale(settings.scale)
        yield cluster
    finally:
        try:
            cluster.close()
        except AssertionError:  # dask-jobqueue wants to see the end of a job that was never taken, again at the exit
            cluster.shutdown_on_close = False


def _check_queue(cls: Any, path: str) -> None:
    """Raises EngineError when the program that submits jobs is not here."""
    command = getattr(getattr(cls, "job_cls", None), "submit_command", None)
    program = str(command).split()[0] if command else ""
    if program and shutil.which(program) is None:
        raise EngineError(
            f"{path} submits jobs with `{program}`, which is not on this machine's PATH. Start gristmill where jobs "
            "are submitted, on a login node."
        )


def wait_for_worker(client: Any, settings: ClusterSettings, cluster: Any, troubles: Troubles) -> None:
    """Waits for the first worker. Raises EngineError when none comes in time, or the cluster cannot ask for any."""
    end = time.monotonic() + settings.workers_within_s
    while time.monotonic() < end and not troubles.said:
        with suppress(TimeoutError):
            client.wait_for_workers(1, timeout=min(0.5, settings.workers_within_s))
            return
    if troubles.said:
        raise EngineError(f"{settings.cls} got no worker: {troubles.said[-1]}")
    hint = "See the queue and the logs of its jobs. "
    if settings.scale is None and settings.adapt is None:
        hint = "The file of --cluster asks for none: give `scale` or `adapt`. "
    script = getattr(cluster, "job_script", None)
    text = f"The script of a job:\n{script().strip()}" if callable(script) else ""
    raise EngineError(
        f"No worker of {settings.cls} came within {settings.workers_within_s:.0f} s (`workers_within_s`). {hint}"
        f"Workers connect to {client.scheduler.address}: that address must be reachable from them.\n{text}".rstrip()
    )


def offering(workers: Mapping[str, Any], resources: Mapping[str, float]) -> bool:
    """True when some worker offers all of it. workers: address -> what the scheduler knows of it."""
    offers = [one.get("resources", {}) for one in workers.values()]
    return any(all(offer.get(name, 0) >= amount for name, amount in resources.items()) for offer in offers)


@contextmanager
def local(count: int) -> Iterator[Any]:
    from distributed import Client, LocalCluster

    _quiet()
    cluster = LocalCluster(
        n_workers=count,
        threads_per_worker=1,
        processes=True,
        host="127.0.0.1",
        dashboard_address="127.0.0.1:0",
        silence_logs=logging.CRITICAL,
        preload=["gristmill.pipelines.steady_clock"],  # workers
    )
    with cluster, Client(cluster) as client:
        yield client


def _client(where: Any, settings: ClusterSettings, connect_s: float) -> Any:
    """A client of a cluster, or of the scheduler at an address. Raises EngineError when nobody answers."""
    from distributed import Client

    security = settings.tls.security() if settings.tls is not None else None
    try:
        return Client(where, timeout=connect_s, **({"security": security} if security is not None else {}))
    except (OSError, TimeoutError, TypeError, RuntimeError, ValueError) as error:
        if settings.cls is not None:
            raise EngineError(f"The scheduler of {settings.cls} does not answer: {error}.") from error
        if str(where).startswith("tls://"):
            what = "" if settings.tls is not None else " No `tls:` is given in a file of --cluster."
            raise EngineError(
                f"No Dask scheduler answers at {where} with these certificates: {error}.{what} Scheduler, workers and "
                "driver need certificates of one authority: `tls: {ca: FILE, cert: FILE, key: FILE}`, and "
                "`dask scheduler --tls-ca-file --tls-cert --tls-key`."
            ) from error
        raise EngineError(
            f"No Dask scheduler answers at {where}: {error}. Start one with `dask scheduler` and at least one "
            f"`dask worker {where}`."
        ) from error
