"""How sure we are: intervals over seeds, bootstrap over documents, paired tests, many comparisons.

Two things make a score uncertain, and each has its own test. Another seed gives another model: that is measured by
repeating every mixture with the same set of seeds. Another sample of held-out documents gives another score of the
same model: that is measured by drawing documents again. Two mixtures count as different only where both tests say so.

    table = np.array([[1.31, 1.33], [1.42, 1.45], [1.32, 1.32]])     # (mixtures, seeds), bits per byte
    seed_tests(table)[0].p                                           # of the first pair
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import TYPE_CHECKING

import numpy as np
from scipy import stats as scipy_stats

if TYPE_CHECKING:
    from gristmill.trainer.score import Texts


COUNTS_AT_A_TIME = 1 << 22  # of documents that are drawn again: 32 MiB


@dataclass(frozen=True)
class Interval:
    """A mean and where it may lie. low and high are NaN where one value says nothing about the spread."""

    mean: float
    low: float
    high: float

    def excludes(self, value: float) -> bool:
        return self.low > value or self.high < value


def t_interval(values: Sequence[float], confidence: float = 0.95) -> Interval:
    """Student's interval for the mean of independent runs; with one value only the mean is known."""
    array = np.asarray(values, dtype=np.float64)
    if len(array) < 1:
        raise ValueError("an interval needs at least one value")
    mean = float(array.mean())
    if len(array) == 1:
        return Interval(mean, math.nan, math.nan)
    half = float(scipy_stats.t.ppf((1 + confidence) / 2, len(array) - 1) * array.std(ddof=1) / math.sqrt(len(array)))
    return Interval(mean, mean - half, mean + half)


@dataclass(frozen=True)
class SeedTest:
    """Difference of two rows of a table of scores, tested against the spread between seeds."""

    first: int
    second: int
    difference: float  # mean of first minus mean of second
    standard_error: float
    degrees: int
    p: float  # two-sided; NaN where no spread is known

    def interval(self, confidence: float = 0.95) -> Interval:
        if self.degrees < 1:
            return Interval(self.difference, math.nan, math.nan)
        half = float(scipy_stats.t.ppf((1 + confidence) / 2, self.degrees)) * self.standard_error
        return Interval(self.difference, self.difference - half, self.difference + half)


def seed_noise(table: np.ndarray) -> tuple[float, int]:
    """Standard deviation of one run around its mixture and its seed, and its degrees of freedom.

    table (mixtures, seeds), every cell a run. Mixtures that share seeds share first weights, so a seed's own effect
    is taken out (randomised complete blocks): residuals are y - row mean - column mean + mean, with
    (mixtures - 1)(seeds - 1) degrees of freedom. For two mixtures that is the paired t-test. A spread that is common
    to all mixtures is assumed, which is what makes two or three seeds enough.
    """
    table = np.asarray(table, dtype=np.float64)
    mixtures, seeds = table.shape
    degrees = (mixtures - 1) * (seeds - 1)
    if degrees < 1:
        return math.nan, 0
    residual = table - table.mean(axis=1, keepdims=True) - table.mean(axis=0, keepdims=True) + table.mean()
    return math.sqrt(float((residual**2).sum()) / degrees), degrees


def pooled_noise(table: np.ndarray, repeats: Sequence[float] = ()) -> tuple[float, int]:
    """`seed_noise`, with runs of a control mixture on seeds that no other mixture has.

    Sums of squares and degrees of freedom add up. A repeat differs from another by its seed as well, so where seeds
    have an effect of their own the noise comes out too large, never too small.
    """
    noise, degrees = seed_noise(table)
    squares = degrees * noise**2 if degrees else 0.0
    if len(repeats) > 1:
        squares += float(((np.asarray(repeats, dtype=np.float64) - np.mean(repeats)) ** 2).sum())
        degrees += len(repeats) - 1
    return (math.sqrt(squares / degrees), degrees) if degrees else (math.nan, 0)


def smallest_difference(noise: float, degrees: int, seeds: int, confidence: float = 0.95) -> float:
    """What two mixtures of `seeds` runs each must differ by for one test of seeds to call it real; NaN if unknown."""
    if degrees < 1:
        return math.nan
    return float(scipy_stats.t.ppf((1 + confidence) / 2, degrees)) * noise * math.sqrt(2 / seeds)


def seed_tests(table: np.ndarray, repeats: Sequence[float] = ()) -> list[SeedTest]:
    """Every pair of rows of (mixtures, seeds), in the order of itertools.combinations. repeats as `pooled_noise`."""
    table = np.asarray(table, dtype=np.float64)
    noise, degrees = pooled_noise(table, repeats)
    out = []
    for a, b in combinations(range(len(table)), 2):
        difference = float(table[a].mean() - table[b].mean())
        if degrees < 1:
            out.append(SeedTest(a, b, difference, math.nan, 0, math.nan))
            continue
        error = noise * math.sqrt(2 / table.shape[1])
        # Residuals of equal tables are rounding, not spread: a difference of that size says nothing either.
        if error <= 1e-12 * max(1.0, float(np.abs(table).max())):
            p = 1.0 if abs(difference) <= 1e-12 * max(1.0, float(np.abs(table).max())) else 0.0
        else:
            p = float(2 * scipy_stats.t.sf(abs(difference) / error, degrees))
        out.append(SeedTest(a, b, difference, error, degrees, p))
    return out


def holm(p_values: Sequence[float]) -> list[float]:
    """Holm's (1979) step-down adjustment: compare with the level as they are. NaN stays NaN and does not count."""
    known = [i for i, p in enumerate(p_values) if not math.isnan(p)]
    out, largest = list(p_values), 0.0
    for rank, i in enumerate(sorted(known, key=lambda i: p_values[i])):
        largest = max(largest, min(1.0, (len(known) - rank) * p_values[i]))
        out[i] = largest
    return out


def _draws(documents: int, draws: int, rng: np.random.Generator) -> np.ndarray:
    """(draws, documents) float64: how often each document is drawn when `documents` are drawn with replacement."""
    return rng.multinomial(documents, np.full(documents, 1 / documents), size=draws).astype(np.float64)


def bootstrap_scores(sources: Sequence[Sequence[Texts]], draws: int = 2_000, seed: int = 0) -> np.ndarray:
    """Scores of several models on resampled documents: (models, draws) float64.

    sources[s][m]: the documents of source s under model m, the same ones in the same order for every m; all models
    see the same draws, so differences are paired. A score is the mean over sources of bits per byte: sources weigh
    alike, and within one source documents weigh by their bytes.
    """
    rng = np.random.default_rng(seed)
    out = np.zeros((len(sources[0]), draws))
    for models in sources:
        documents = len(models[0].bits)
        for low in range(0, draws, size := max(1, COUNTS_AT_A_TIME // documents)):
            part = slice(low, min(low + size, draws))
            counts = _draws(documents, part.stop - low, rng)
            for m, texts in enumerate(models):
                out[m, part] += (counts @ texts.bits) / (counts @ texts.bytes.astype(np.float64)) / len(sources)
    return out


def percentile_interval(point: float, draws: np.ndarray, confidence: float = 0.95) -> Interval:
    """The middle share of resampled values around a point estimate (Efron's percentile interval)."""
    low, high = np.quantile(draws, [(1 - confidence) / 2, (1 + confidence) / 2])
    return Interval(point, float(low), float(high))


def bootstrap_p(differences: np.ndarray) -> float:
    """Two-sided: twice the smaller share of resampled differences on one side of 0, at least 1 / (draws + 1) a side."""
    draws = len(differences)
    side = min(int((differences <= 0).sum()), int((differences >= 0).sum()))
    return min(1.0, 2 * (side + 1) / (draws + 1))
