"""What the leader writes down of each step: metrics.jsonl, trackers, spikes, and the losses a checkpoint is judged by.

with Journal(out, step, feed, config, say) as journal:
    journal.add(line)
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Self

from gristmill.trainer.config import TrainConfig, TrainError
from gristmill.trainer.feed import MAX_NAMED_DOCUMENTS, Feed
from gristmill.trainer.metrics import METRICS_FILE, LinesFile
from gristmill.trainer.spikes import SpikeDetector, SpikeLog
from gristmill.trainer.trackers import open_trackers, values_of

JUDGED = 50  # steps whose mean loss is a checkpoint's training loss


class Journal:
    """Lines in the order of steps; what stands there after `step` is dropped, for it will be done again."""

    def __init__(self, out: Path, step: int, feed: Feed, config: TrainConfig, say: Callable[[str], None]):
        self._feed, self._config, self._say = feed, config, say
        self._file = LinesFile(out / METRICS_FILE, step)
        losses = [line["loss"] for line in self._file.recent if line.get("loss") is not None]
        self._recent: deque[float] = deque(losses, maxlen=JUDGED)
        self._detector = SpikeDetector(config.spike_threshold, losses)
        self._spikes = SpikeLog(out, step)
        self._scored: tuple[int, float] | None = None
        self._trackers = open_trackers(config.trackers, out, step, feed.course, config.model_dump(mode="json"))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()
        self._spikes.close()
        for name, tracker in list(self._trackers.items()):
            self._try(name, tracker.close)

    def add(self, line: dict[str, Any]) -> None:
        """Raises TrainError where the disk refuses."""
        step = int(line["step"])
        try:
            self._file.add(line)
            self._look(line)
        except OSError as error:
            raise TrainError(
                f"{self._file.path}: step {step} could not be written: {error.strerror}. Free some space and run "
                "again: training goes on from the last checkpoint."
            ) from error
        if line["loss"] is not None:
            self._recent.append(line["loss"])
        if line.get("bits_per_byte"):
            scores = line["bits_per_byte"].values()
            self._scored = step, sum(scores) / len(scores)
        for name, tracker in list(self._trackers.items()):
            self._try(name, partial(tracker.add, step, values_of(line)))

    def _look(self, line: dict[str, Any]) -> None:
        """Logs a step that stands out."""
        skipped = bool(line.get("skipped"))
        spike = None if skipped else self._detector.observe(line["loss"])
        if not skipped and spike is None:
            return
        step, size = int(line["step"]), self._config.batch_windows
        documents = self._feed.documents((step - 1) * size, step * size)
        self._spikes.add(step, spike, documents)
        what = (
            "loss or gradient is not a number; skipped"
            if spike is None
            else f"loss {spike.loss:.4f} stands out from a median of {spike.median:.4f} +- {spike.deviation:.4f}"
        )
        names = [document["doc_id"] for document in documents[:MAX_NAMED_DOCUMENTS]]
        more = [f"and {len(documents) - len(names)} more in spikes.jsonl"] if len(documents) > len(names) else []
        self._say(f"Step {step}: {what}. Documents: {', '.join([*names, *more])}")

    def _try(self, name: str, act: Callable[[], None]) -> None:
        """A tracker is another program, whatever it raises; training does not depend on it."""
        try:
            act()
        except Exception as error:
            self._trackers.pop(name, None)
            self._say(f"Tracker {name} failed and is given up: {type(error).__name__}: {error}. Training goes on.")

    def loss_at(self, step: int) -> dict[str, float]:
        """What a checkpoint of this step is the best by: mean training loss of the last steps, score of this one."""
        out = {"training": sum(self._recent) / len(self._recent)} if self._recent else {}
        if self._scored is not None and self._scored[0] == step:
            out["evaluation"] = self._scored[1]
        return out
