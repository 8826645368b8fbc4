"""Mixtures compared on one measure: two tests for each pair, adjusted for how many pairs there are.

A measure is bits per byte of a source's held-out documents, of a text given, or of a task's right answers; or a task's
accuracy. All are a sum over documents (items) divided by a sum of sizes, so all are drawn again in the same way.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Literal

import numpy as np
from pydantic import Field

from gristmill.stages.documents import Settings
from gristmill.trainer.score import Scores, Texts
from gristmill.trainer.stats import (
    Interval,
    bootstrap_p,
    bootstrap_scores,
    holm,
    percentile_interval,
    pooled_noise,
    seed_tests,
    t_interval,
)
from gristmill.trainer.tasks import TaskItems

SAME = "not distinguishable"
Kind = Literal["held_out", "text", "answers", "accuracy"]
Tasks = Mapping[str, TaskItems]


class Range(Settings):
    """A mean with an interval; null bounds where one value says nothing about the spread."""

    mean: float
    low: float | None
    high: float | None

    @classmethod
    def of(cls, interval: Interval) -> Range:
        known = not math.isnan(interval.low)
        return cls(mean=interval.mean, low=interval.low if known else None, high=interval.high if known else None)


class PairRow(Settings):
    """Two mixtures compared; differences are first minus second."""

    first: str
    second: str
    difference: Range  # over seeds
    documents: Range  # over resampled documents
    p_seeds: float | None  # null where no spread is known
    p_documents: float
    p: float | None  # the larger one, Holm-adjusted over all pairs of its family
    verdict: str  # "<name> is better", or "not distinguishable"


class MeasureRow(Settings):
    """Every mixture on one measure."""

    name: str
    kind: Kind
    higher_is_better: bool
    baseline: float | None = None  # of an accuracy: what guessing gives
    noise: float | None  # standard deviation of one run around its mixture and seed
    mixtures: dict[str, Range] = Field(default_factory=dict)  # over seeds
    pairs: list[PairRow] = Field(default_factory=list)


@dataclass(frozen=True)
class Measure:
    """What a run is measured by."""

    name: str
    kind: Kind

    @property
    def higher_is_better(self) -> bool:
        return self.kind == "accuracy"

    def texts(self, scores: Scores, tasks: Tasks) -> Texts:
        """What it is of one run."""
        if self.kind in ("held_out", "text"):
            return (scores.sources | scores.sets)[self.name].texts
        items = tasks[self.name]
        found = items.answers if self.kind == "answers" else items.right()
        assert found is not None, f"{self.name} has no {self.kind}"
        return found


def measures_of(scores: Scores, tasks: Tasks) -> list[Measure]:
    """Everything that a run was measured by."""
    out = [Measure(name, "held_out") for name in sorted(scores.sources)]
    out += [Measure(name, "text") for name in sorted(scores.sets)]
    out += [Measure(name, "answers") for name, items in tasks.items() if items.answers is not None]
    return out + [Measure(name, "accuracy") for name, items in tasks.items() if items.right() is not None]


@dataclass(frozen=True)
class Runs:
    """Finished runs of the mixtures that are compared, and repeats of a control on other seeds."""

    mixtures: Sequence[str]
    scores: Mapping[str, Sequence[Scores]]  # mixture -> one for each seed
    tasks: Mapping[str, Sequence[Tasks]]
    repeats: Sequence[tuple[Scores, Tasks]] = ()

    def texts(self, measure: Measure) -> list[list[Texts]]:
        """(mixtures, seeds)"""
        return [
            [measure.texts(scores, tasks) for scores, tasks in zip(self.scores[m], self.tasks[m], strict=True)]
            for m in self.mixtures
        ]


@dataclass(frozen=True)
class Compared:
    """Mixtures on one measure, or on the mean of several, before p-values are adjusted."""

    table: np.ndarray  # (mixtures, seeds)
    draws: np.ndarray  # (mixtures, draws), of the mean over seeds
    repeats: list[float]  # of the control
    higher_is_better: bool

    @property
    def noise(self) -> tuple[float, int]:
        return pooled_noise(self.table, self.repeats)

    @property
    def p(self) -> list[float]:
        """For each pair, the larger of two: both tests must reject (intersection-union). NaN: no spread is known."""
        by_seeds = [test.p for test in seed_tests(self.table, self.repeats)]
        return [math.nan if math.isnan(a) else max(a, b) for a, b in zip(by_seeds, self.p_documents, strict=True)]

    @property
    def p_documents(self) -> list[float]:
        return [bootstrap_p(self.draws[a] - self.draws[b]) for a, b in combinations(range(len(self.table)), 2)]


def compared(runs: Runs, measures: Sequence[Measure]) -> Compared:
    """measures: one, or several of a kind whose mean counts."""
    texts = [runs.texts(measure) for measure in measures]  # [measure][mixture][seed]
    table = np.mean([[[t.bits_per_byte for t in row] for row in one] for one in texts], axis=0)
    draws = bootstrap_scores([[over_seeds(row) for row in one] for one in texts])
    repeats = [
        float(np.mean([measure.texts(scores, tasks).bits_per_byte for measure in measures]))
        for scores, tasks in runs.repeats
    ]
    return Compared(table, draws, repeats, measures[0].higher_is_better)


def over_seeds(texts: Sequence[Texts]) -> Texts:
    """The same documents with bits and sizes averaged over runs. Sizes differ only between several right answers."""
    return Texts(np.mean([t.bits for t in texts], axis=0), np.mean([t.bytes for t in texts], axis=0))


def pair_rows(names: Sequence[str], found: Compared, adjusted: Sequence[float], confidence: float) -> list[PairRow]:
    """adjusted: p of each pair, after Holm's procedure over the family that it belongs to."""
    rows = []
    tests = seed_tests(found.table, found.repeats)
    for test, p_documents, p in zip(tests, found.p_documents, adjusted, strict=True):
        first, second = names[test.first], names[test.second]
        better = first if (test.difference > 0) == found.higher_is_better else second
        drawn = found.draws[test.first] - found.draws[test.second]
        rows.append(
            PairRow(
                first=first,
                second=second,
                difference=Range.of(test.interval(confidence)),
                documents=Range.of(percentile_interval(test.difference, drawn, confidence)),
                p_seeds=None if math.isnan(test.p) else test.p,
                p_documents=p_documents,
                p=None if math.isnan(p) else p,
                verdict=f"{better} is better" if p < 1 - confidence else SAME,  # false for NaN
            )
        )
    return rows


def measure_rows(runs: Runs, confidence: float) -> list[MeasureRow]:
    """Every measure by itself. p-values are adjusted over all pairs of all of them together: one family."""
    first = runs.mixtures[0]
    measures = measures_of(runs.scores[first][0], runs.tasks[first][0])
    found = [compared(runs, [measure]) for measure in measures]
    adjusted = holm([p for one in found for p in one.p])
    pairs = len(runs.mixtures) * (len(runs.mixtures) - 1) // 2
    rows = []
    for number, (measure, one) in enumerate(zip(measures, found, strict=True)):
        noise, degrees = one.noise
        own = adjusted[number * pairs : (number + 1) * pairs]
        rows.append(
            MeasureRow(
                name=measure.name,
                kind=measure.kind,
                higher_is_better=measure.higher_is_better,
                baseline=float(runs.tasks[first][0][measure.name].baseline.mean())
                if measure.kind == "accuracy"
                else None,
                noise=noise if degrees else None,
                mixtures={
                    name: Range.of(t_interval(row, confidence))
                    for name, row in zip(runs.mixtures, one.table, strict=True)
                },
                pairs=pair_rows(runs.mixtures, one, own, confidence),
            )
        )
    return rows
