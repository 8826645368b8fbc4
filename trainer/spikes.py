"""Steps whose loss stands out, with the documents that they saw: spikes.jsonl.

A loss is a spike where it lies more than `spike_threshold` robust standard deviations above the median of the last
WINDOW losses. The deviation is 1.4826 times the median absolute deviation (Rousseeuw & Croux 1993: consistent for a
normal distribution), so that earlier spikes do not raise the bar for the next as they would with mean and standard
deviation. OLMo-core's guard has the same length and threshold, 128 steps and 6 deviations (`SkipStepOptimizer`).

    {"step": 812, "why": "spike", "loss": 9.1, "median": 3.2, "deviation": 0.04, "documents": [
        {"source": "web", "shard": "part-00003", "doc_id": "..."}, ...]}

Steps whose loss or gradient is no number are written as well, with why "not a number". The weights that gave the loss
are those after the step before, whose documents may be to blame too: `gristmill trace --train RUN --step N`.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from gristmill.trainer.metrics import RECENT, LinesFile

SPIKES_FILE = "spikes.jsonl"
WINDOW = RECENT  # steps
FEWEST = 32  # steps before anything is called a spike
NORMAL = 1.4826  # standard deviations in one median absolute deviation
LEAST_DEVIATION = 0.005  # of the median: where losses hardly differ, a tiny step is no spike
MOST_DOCUMENTS = 10_000  # in a line


@dataclass(frozen=True)
class Spike:
    loss: float
    median: float
    deviation: float  # robust standard deviation


class SpikeDetector:
    """observe(loss) of each step in order. A loss that is no number is left out."""

    def __init__(self, threshold: float, before: Iterable[float] = ()):
        """threshold: deviations; 0 calls nothing a spike. before: losses of earlier steps."""
        self.threshold = threshold
        self.losses: deque[float] = deque(before, maxlen=WINDOW)

    def observe(self, loss: float) -> Spike | None:
        if not math.isfinite(loss):
            return None
        found = self._judge(loss) if self.threshold and len(self.losses) >= FEWEST else None
        self.losses.append(loss)
        return found

    def _judge(self, loss: float) -> Spike | None:
        middle = median(self.losses)
        deviation = NORMAL * median(abs(each - middle) for each in self.losses)
        deviation = max(deviation, LEAST_DEVIATION * abs(middle))
        return Spike(loss, middle, deviation) if loss > middle + self.threshold * deviation else None


class SpikeLog:
    """spikes.jsonl of a run. Opening it at a step drops the lines after that step, as metrics.jsonl does."""

    def __init__(self, folder: Path, step: int):
        self._path, self._step = folder / SPIKES_FILE, step
        self._file: LinesFile | None = LinesFile(self._path, step) if self._path.exists() else None

    def add(self, step: int, spike: Spike | None, documents: list[dict[str, str]]) -> None:
        """spike: None for a step whose loss or gradient is no number."""
        line: dict[str, Any] = {"step": step, "why": "not a number" if spike is None else "spike"}
        if spike is not None:
            line |= {"loss": spike.loss, "median": spike.median, "deviation": spike.deviation}
        if len(documents) > MOST_DOCUMENTS:
            line["documents_in_all"] = len(documents)
        if self._file is None:
            self._file = LinesFile(self._path, self._step)
        self._file.add({**line, "documents": documents[:MOST_DOCUMENTS]})

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
