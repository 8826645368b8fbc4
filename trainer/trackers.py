"""Where the numbers of metrics.jsonl go besides: TensorBoard, Weights & Biases, Trackio.

    trackers: [tensorboard, wandb, trackio]        # in the settings; [] for none

TensorBoard's event files lie in the run's folder under `tensorboard`. W&B gets a run of the project `gristmill`
(WANDB_PROJECT changes it); without a key it is kept offline, in the run's folder. Trackio keeps its own database on
this machine. A run that goes on after a restart goes on in the same run there. metrics.jsonl is written in any case,
so a tracker that fails is given up with one message, and training goes on.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

from gristmill.trainer.config import TrainError

PROJECT = "gristmill"


class Tracker(Protocol):
    def add(self, step: int, values: Mapping[str, float]) -> None: ...

    def close(self) -> None: ...


def require(names: Iterable[str]) -> None:
    """Raises TrainError where the package of a tracker is missing."""
    for name in names:
        if find_spec(name) is None:
            raise TrainError(
                f"trackers: {name} needs the package {name}, which is not installed. `pip install {name}`, or take it "
                "out of `trackers`."
            )


def values_of(line: Mapping[str, Any]) -> dict[str, float]:
    """The numbers of a line of metrics.jsonl, those inside an object as `name/key`."""
    out: dict[str, float] = {}
    for name, value in line.items():
        if isinstance(value, Mapping):
            out |= {f"{name}/{key}": float(each) for key, each in value.items()}
        elif isinstance(value, int | float) and not isinstance(value, bool) and name != "step":
            out[name] = float(value)
    return out


class TensorBoard:
    """Event files by tensorboard's own writer: a tenth of a second to load, where torch's SummaryWriter takes one."""

    def __init__(self, folder: Path, step: int):
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog
        from tensorboard.compat.proto.summary_pb2 import Summary
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self._event, self._summary = Event, Summary
        self._writer: Any = EventFileWriter(str(folder / "tensorboard"))
        again = SessionLog(status=SessionLog.START)  # what follows replaces these steps of earlier files
        self._writer.add_event(Event(wall_time=time.time(), step=step + 1, session_log=again))

    def add(self, step: int, values: Mapping[str, float]) -> None:
        points = [self._summary.Value(tag=name, simple_value=value) for name, value in values.items()]
        self._writer.add_event(self._event(wall_time=time.time(), step=step, summary=self._summary(value=points)))

    def close(self) -> None:
        self._writer.close()


class Wandb:
    def __init__(self, folder: Path, identity: str, settings: Mapping[str, Any]):
        import wandb

        online = bool(os.environ.get("WANDB_API_KEY")) or Path("~/.netrc").expanduser().exists()
        self._run: Any = wandb.init(
            project=os.environ.get("WANDB_PROJECT", PROJECT),
            name=folder.name,
            id=identity,
            resume="allow",
            dir=str(folder),
            config=dict(settings),
            mode=os.environ.get("WANDB_MODE") or ("online" if online else "offline"),
        )
        # Its own counter must not go back, which a run does after a restart.
        self._run.define_metric("*", step_metric="step")

    def add(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log({**values, "step": step})

    def close(self) -> None:
        self._run.finish()


class Trackio:
    def __init__(self, folder: Path, identity: str, settings: Mapping[str, Any]):
        import trackio

        self._run: Any = trackio.init(
            project=PROJECT, name=f"{folder.name}-{identity[:8]}", config=dict(settings), resume="allow", embed=False
        )

    def add(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log(dict(values), step=step)

    def close(self) -> None:
        self._run.finish()


def open_trackers(
    names: Iterable[str], folder: Path, step: int, identity: str, settings: Mapping[str, Any]
) -> dict[str, Tracker]:
    """step: the last one done. identity: of the run, the same after a restart. Raises TrainError as `require`."""
    names = list(names)
    require(names)
    makers: dict[str, Callable[[], Tracker]] = {
        "tensorboard": lambda: TensorBoard(folder, step),
        "wandb": lambda: Wandb(folder, identity, settings),
        "trackio": lambda: Trackio(folder, identity, settings),
    }
    return {name: makers[name]() for name in names}
