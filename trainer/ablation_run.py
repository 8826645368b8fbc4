"""One run of an ablation: found where it is done, else trained and asked its tasks, tried again where it fails.

    row = found_row(job) or carry_out(job, tell)

`ablate.py` plans the runs and ranks what came of them.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gristmill.trainer.checkpoint import CheckpointState, complete, read_state
from gristmill.trainer.config import BYSTANDERS, RUN_FILE, SCORING, Run, TrainConfig, TrainError
from gristmill.trainer.launch import Outcome, finished, run
from gristmill.trainer.ranking import RunRow
from gristmill.trainer.tasks import TaskSettings

TASKS_FOLDER = "tasks"
OnEvent = Callable[[dict[str, Any]], None]


@dataclass(frozen=True)
class Planned:
    """A run to do."""

    name: str  # of its folder
    mixture: str
    path: str
    seed: int
    config: TrainConfig
    key: str
    course: str
    tokens: str  # folder
    out: str  # folder of the run
    tasks: TaskSettings | None
    retries: int


def found_row(job: Planned) -> RunRow | None:
    """The row of a run that is there, tasks included, with the same keys."""
    outcome = finished(Path(job.out), job.key)
    if outcome is None or outcome.scores is None:
        return None
    summaries = {}
    if job.tasks is not None:
        from gristmill.trainer.evaluate import finished_tasks, task_key

        state = _newest(Path(job.out))
        key = "" if state is None else task_key(state.course, state.progress.step, job.tasks)
        done = finished_tasks(Path(job.out) / TASKS_FOLDER, key)
        if done is None:
            return None
        summaries = done.tasks
    return _row(job, outcome, summaries, reused=True)


def carry_out(job: Planned, tell: OnEvent) -> RunRow:
    """Trains one run and asks it the tasks; tries again what fails. Raises TrainError when it was stopped."""
    folder, steps = Path(job.out), job.config.total_steps
    tell({"event": "start", "run": job.name, "steps": steps})
    error = ""
    for _ in range(1 + job.retries):
        try:
            outcome = finished(folder, job.key)
            if outcome is None:
                _clear_other(folder, job)
                outcome = run(
                    job.config,
                    job.path,
                    job.tokens,
                    job.out,
                    lambda line: tell({"event": "step", "run": job.name, "steps": steps, **line}),
                    job.key,
                )
            if outcome.scores is None:
                raise Stopped(f"{folder}: training was stopped from outside. The same command goes on from there.")
            row = _row(job, outcome, _asked(job), reused=False)
        except Stopped:
            raise
        except TrainError as problem:
            error = str(problem)
            continue
        tell({"event": "done", "run": job.name, "bits_per_byte": row.bits_per_byte})
        return row
    tell({"event": "failed", "run": job.name, "error": error})
    return failed_row(job, error)


class Stopped(TrainError):
    """A run was asked to end from outside: no fault of its own, and no reason to try again at once."""


def failed_row(job: Planned, error: str) -> RunRow:
    return RunRow(name=job.name, mixture=job.mixture, seed=job.seed, status="failed", error=error)


def _asked(job: Planned) -> dict[str, dict[str, Any]]:
    """What the tasks of a finished run came to; asked now where they are not there."""
    if job.tasks is None:
        return {}
    from gristmill.trainer.evaluate import evaluate_tasks, finished_tasks, task_key
    from gristmill.trainer.trained import open_trained

    trained, folder = open_trained(job.out), Path(job.out) / TASKS_FOLDER
    key = task_key(trained.state.course, trained.state.progress.step, job.tasks)
    done = finished_tasks(folder, key) or evaluate_tasks(trained, job.tasks, str(folder), job.config.device)
    return done.tasks


def _clear_other(folder: Path, job: Planned) -> None:
    """Removes what a run of other settings or data left under this name.

    Where only the texts that are scored are others, the checkpoint is the same: it stays and is scored again.
    """
    path = folder / RUN_FILE
    if not path.exists():
        return
    before, state = Run.load(path), _newest(folder)
    course = "" if state is None else state.course
    if before.key != job.key and _weights(before.config, course) != _weights(job.config, job.course):
        shutil.rmtree(folder)


def _weights(config: TrainConfig, course: str) -> list[Any]:
    """Everything that decides the weights."""
    return [config.model_dump(mode="json", exclude=BYSTANDERS | SCORING), course]


def _newest(folder: Path) -> CheckpointState | None:
    """State of a run's newest checkpoint."""
    found = complete(folder / "checkpoints")
    return read_state(found[-1]) if found else None


def _row(job: Planned, outcome: Outcome, tasks: Mapping[str, dict[str, Any]], *, reused: bool) -> RunRow:
    assert outcome.scores is not None
    return RunRow(
        name=job.name,
        mixture=job.mixture,
        seed=job.seed,
        status="done",
        reused=reused,
        score=outcome.scores.mean,
        bits_per_byte=outcome.scores.bits_per_byte,
        evaluation_sets=outcome.scores.of_sets,
        tasks=dict(tasks),
        tokens=outcome.done["sources"],
        skipped=outcome.done["skipped"],
        seconds=outcome.done["seconds"],
    )
