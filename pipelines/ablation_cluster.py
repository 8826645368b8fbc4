"""The runs of an ablation on a Dask cluster: each is one task of the scheduler, by resources.

    gristmill ablate FILE --tokens DIR --scheduler tcp://host:8786 --resources GPU=8
    gristmill ablate FILE --tokens DIR --cluster cluster.yaml          # resources: {ablation: {GPU: 8}}

A worker that takes a run starts its ranks under torchrun on its own machine, so a run has as many GPUs as `ranks` says
and the scheduler as many runs at a time as the workers' resources allow (`dask worker --resources GPU=8`). Tokens,
mixtures and the folder of the ablation must be on a storage that all machines share. A run whose worker is lost is
given to another one, `retries` times as any that fails, and goes on from its last checkpoint; then it is reported.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from gristmill.pipelines.cluster_file import ClusterSettings
from gristmill.pipelines.connect import Troubles, connected, offering
from gristmill.pipelines.worker_check import EngineError, compare_workers
from gristmill.trainer.ablate import Carry
from gristmill.trainer.ablation_run import OnEvent, Planned, carry_out, failed_row
from gristmill.trainer.config import TrainError
from gristmill.trainer.ranking import RunRow

TOPIC = "gristmill-ablation"
STEP_EVENTS = 50  # of a run that are told of, at most: the scheduler keeps them all
CONNECT_S = 60.0
WAIT_S = 2.0  # between looks at which workers there are


def on_cluster(settings: ClusterSettings, resources: dict[str, float], out: str) -> Carry:
    """A `Carry` that starts or finds the cluster when there is something to do."""

    def carry(todo: Sequence[tuple[int, Planned]], tell: OnEvent) -> Iterator[tuple[int, RunRow]]:
        if not todo:
            return
        Path(out).mkdir(parents=True, exist_ok=True)
        with Troubles() as troubles, connected(settings, troubles, CONNECT_S) as client:
            compare_workers(client, client.scheduler.address, out)
            _check_resources(client, resources)
            yield from _carried(client, todo, resources, tell)

    return carry


def _check_resources(client: Any, resources: dict[str, float]) -> None:
    """Raises EngineError where no worker will ever take a run."""
    workers = client.scheduler_info(n_workers=-1)["workers"]
    if not offering(workers, resources):
        wanted = ", ".join(f"{name}={amount:g}" for name, amount in resources.items())
        raise EngineError(
            f"No worker offers {wanted}, which each run takes. Start workers with `dask worker --resources "
            f"{wanted!r}`, or ask for less with --resources."
        )


def _carried(
    client: Any, todo: Sequence[tuple[int, Planned]], resources: dict[str, float], tell: OnEvent
) -> Iterator[tuple[int, RunRow]]:
    """Rows as runs end. A run whose worker died is submitted again, as often as the ablation allows."""
    from distributed import as_completed

    def heard(event: tuple[float, Any]) -> None:
        said = event[1]
        if isinstance(said, dict) and said.get("event") in ("start", "step"):
            tell(said)

    client.subscribe_topic(TOPIC, heard)
    try:
        jobs = {position: whole_paths(job) for position, job in todo}
        kills = dict.fromkeys(jobs, 0)
        places: dict[Any, int] = {}

        def submit(position: int) -> Any:
            job = jobs[position]
            future = client.submit(
                on_worker, job, key=f"{job.name}-{kills[position]}", resources=resources, pure=False, retries=0
            )
            places[future] = position
            return future

        pending = as_completed([submit(position) for position in jobs])
        for future in pending:
            position = places.pop(future)
            job = jobs[position]
            if future.status == "finished":
                row = future.result()
            else:
                error = _said(future)
                kills[position] += 1
                if kills[position] <= job.retries:
                    pending.add(submit(position))
                    continue
                row = failed_row(job, error)
            future.release()
            if row.status == "done":
                tell({"event": "done", "run": row.name, "bits_per_byte": row.bits_per_byte})
            else:
                tell({"event": "failed", "run": row.name, "error": row.error})
            yield position, row
    finally:
        client.unsubscribe_topic(TOPIC)
        for future in list(places):
            future.cancel()


def _said(future: Any) -> str:
    error = future.exception()
    kind = type(error).__name__
    if kind == "KilledWorker":
        return "its worker was lost while it trained; the end of its log is in log.txt of the run's folder"
    return str(error) if isinstance(error, TrainError) else f"{kind}: {error}"


def whole_paths(job: Planned) -> Planned:
    """With paths that mean the same in another working folder."""
    path, tokens, out = (str(Path(place).resolve()) for place in (job.path, job.tokens, job.out))
    return replace(job, path=path, tokens=tokens, out=out)


def on_worker(job: Planned) -> RunRow:
    """One run, on the worker that took it. Some of its steps are told of through the scheduler."""
    from distributed import get_worker

    worker = get_worker()
    return carry_out(job, told_now_and_then(lambda event: worker.log_event(TOPIC, event), job.config.total_steps))


def told_now_and_then(tell: Callable[[dict[str, Any]], None], steps: int) -> OnEvent:
    """Every event but the steps, and about STEP_EVENTS of those, the last among them."""
    every = max(1, steps // STEP_EVENTS)

    def on_event(event: dict[str, Any]) -> None:
        step = event.get("step", 0)
        if event["event"] != "step" or step % every == 0 or step == steps:
            tell({name: value for name, value in event.items() if not isinstance(value, dict)})

    return on_event


def resources_of(settings: ClusterSettings, given: str | None) -> dict[str, float]:
    """What a run takes of its worker: of --resources (`GPU=8,big=1`), else of the file's `resources`, entry `ablation`.

    Raises EngineError for what cannot be read.
    """
    if given is None:
        return settings.taken(["ablation"])
    out = {}
    for part in given.split(","):
        name, _, amount = part.partition("=")
        try:
            out[name.strip()] = float(amount)
        except ValueError:
            raise EngineError(f"--resources {given}: write NAME=AMOUNT, for example GPU=8.") from None
    return out
