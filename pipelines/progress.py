"""What an operator sees while a run goes on: one progress display on standard error, or JSON lines for programs."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

import orjson
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
)


class Phase:
    """One row of the display. Counts may be zero where a phase has no documents to speak of."""

    def __init__(self, name: str, total: int, display: Display) -> None:
        self.name, self.total = name, total
        self.done = self.documents = self.kept = self.bytes = 0
        self._display = display
        self._begun = time.monotonic()
        self._task: TaskID | None = display.add(name, total)

    def advance(self, *, documents: int = 0, kept: int = 0, bytes_: int = 0, pieces: int = 1) -> None:
        """A piece is done, with what it read and kept."""
        self.done += pieces
        self.documents += documents
        self.kept += kept
        self.bytes += bytes_
        self._display.update(self, self._task, self.figures())

    def to(self, done: int, total: int, text: str = "") -> None:
        """Sets the state of a phase that knows its own total."""
        self.done, self.total = done, total
        self._display.update(self, self._task, text)

    def figures(self) -> str:
        seconds = max(time.monotonic() - self._begun, 1e-9)
        parts = []
        if self.documents:
            parts.append(f"{self.documents / seconds:,.0f} docs/s")
        if self.bytes:
            parts.append(f"{self.bytes / seconds / 1e6:,.1f} MB/s")
        if self.documents and self.kept:
            parts.append(f"kept {self.kept / self.documents:.0%}")
        return "  ".join(parts)

    def seconds(self) -> float:
        return time.monotonic() - self._begun


class Display:
    """Progress bars on a terminal, a line a phase elsewhere, JSON lines on standard output with `as_json`."""

    def __init__(self, *, as_json: bool = False) -> None:
        self.as_json = as_json
        self.console = Console(stderr=True)
        self._progress = Progress(
            SpinnerColumn(),
            TextColumn("{task.description:<28}"),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TimeRemainingColumn(compact=True),
            TextColumn("{task.fields[figures]}"),
            console=self.console,
            disable=as_json or not self.console.is_terminal,
        )
        self._last_event = 0.0

    def __enter__(self) -> Display:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def say(self, text: str) -> None:
        """A line that stays."""
        if self.as_json:
            self.event("message", text=text)
        else:
            self._progress.console.print(text, highlight=False, markup=False, soft_wrap=True)

    def event(self, kind: str, **fields: object) -> None:
        """A JSON line, when a program reads."""
        if self.as_json:
            sys.stdout.buffer.write(orjson.dumps({"event": kind, **fields}) + b"\n")
            sys.stdout.buffer.flush()

    @contextmanager
    def phase(self, name: str, total: int) -> Iterator[Phase]:
        """A row for as long as the block runs; a summary line afterwards."""
        phase = Phase(name, total, self)
        yield phase
        if phase._task is not None:
            self._progress.remove_task(phase._task)
        seconds = phase.seconds()
        self.event("phase", name=name, pieces=phase.done, documents=phase.documents, seconds=round(seconds, 3))
        if not self.as_json:
            self.say(f"  {name:<28} {phase.done:>6,} done in {seconds:6.1f} s   {phase.figures()}".rstrip())

    def add(self, name: str, total: int) -> TaskID:
        return self._progress.add_task(name, total=total, figures="")

    def update(self, phase: Phase, task: TaskID | None, figures: str) -> None:
        if task is not None:
            self._progress.update(task, completed=phase.done, total=phase.total, figures=figures)
        now = time.monotonic()
        if self.as_json and (now - self._last_event > 1 or phase.done == phase.total):
            self._last_event = now
            self.event("progress", name=phase.name, done=phase.done, total=phase.total, figures=figures)
