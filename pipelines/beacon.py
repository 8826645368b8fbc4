"""What a driver says of itself while it works: `driver.json` in the run folder, for `gristmill status`."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Sequence
from typing import Any

import orjson

from gristmill.pipelines.engine import Engine
from gristmill.pipelines.progress import Phase
from gristmill.stages.shards import join, publish_bytes

EVERY_S = 5.0
SHOWN = 20  # running pieces


class Beacon:
    """Writes the file every few seconds for as long as the block runs."""

    def __init__(self, out: str, engine: Engine, *, every_s: float = EVERY_S) -> None:
        self._path, self._engine, self._every_s = join(out, "driver.json"), engine, every_s
        self._phase: Phase | None = None
        self._labels: Sequence[str] = ()
        self._begun = time.time()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._loop, name="gristmill-beacon", daemon=True)

    def __enter__(self) -> Beacon:
        self._workers = self._engine.workers
        publish_bytes(self._path, self.said("running"))
        self._thread.start()
        return self

    def __exit__(self, kind: Any, *_: object) -> None:
        self._stop.set()
        self._thread.join()
        try:
            publish_bytes(self._path, self.said("ended" if kind is None else "failed"))
        except OSError:
            if kind is None:
                raise  # else the first error says what is wrong with the storage

    def show(self, phase: Phase, labels: Sequence[str]) -> None:
        """From now on this phase; labels: of its pieces, by position."""
        self._phase, self._labels = phase, labels

    def said(self, state: str) -> bytes:
        now = time.time()
        body: dict[str, Any] = {
            "state": state,
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "started": self._begun,
            "updated": now,
            "dashboard": self._engine.dashboard,
            "workers": self._workers,
            "tried_again": self._engine.tried_again,
        }
        if self._phase is not None and state == "running":
            phase = self._phase
            body["phase"] = {
                "name": phase.name,
                "done": phase.done,
                "total": phase.total,
                "documents": phase.documents,
                "kept": phase.kept,
                "bytes": phase.bytes,
                "seconds": round(phase.seconds(), 3),
            }
            running = sorted(self._engine.running(), key=lambda piece: -piece.seconds)[:SHOWN]
            labels = self._labels
            body["running"] = [
                {"piece": labels[one.position], "seconds": round(one.seconds, 1)}
                for one in running
                if one.position < len(labels)
            ]
        return orjson.dumps(body, option=orjson.OPT_INDENT_2)

    def _loop(self) -> None:
        while not self._stop.wait(self._every_s):
            try:
                publish_bytes(self._path, self.said("running"))
            except OSError:
                continue  # the run itself reports a storage that is away
