"""Before an ablation: how many seeds and tokens it takes to see a difference.

    gristmill ablate ablation.yaml --power 0.005                     # noise from the ablation's ranking.json
    gristmill ablate ablation.yaml --power 0.005 --noise 0.004       # or assumed

Power is that of the test over seeds (`stats.seed_tests`): exact for a fixed level, by the noncentral t distribution.
For more than two mixtures the level of one pair is divided by the number of pairs (Bonferroni), which is what Holm's
procedure asks of the smallest p: so the answer holds for the hardest case. The second test, over documents, is the
same for any number of seeds; what it needs is bytes of held-out text, by the square root law.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

from scipy import stats as scipy_stats

MOST_SEEDS = 10_000


def power_of_seeds(
    noise: float, difference: float, seeds: int, mixtures: int = 2, level: float = 0.05, repeat_degrees: int = 0
) -> float:
    """Chance that two of `mixtures` that differ by `difference` are told apart with `seeds` runs each.

    noise: standard deviation of one run around its mixture and seed (`stats.seed_noise`). repeat_degrees: repeats of
    a control beyond the first, which add to the knowledge of the noise. 0 where the noise cannot be known.
    """
    degrees = (mixtures - 1) * (seeds - 1) + repeat_degrees
    if degrees < 1:
        return 0.0
    pairs = mixtures * (mixtures - 1) // 2
    shift = abs(difference) / (noise * math.sqrt(2 / seeds))
    limit = scipy_stats.t.ppf(1 - level / pairs / 2, degrees)
    found = float(scipy_stats.nct.sf(limit, degrees, shift) + scipy_stats.nct.cdf(-limit, degrees, shift))
    return 1.0 if math.isnan(found) and shift > limit else found  # far out SciPy's series gives up


def seeds_needed(
    noise: float,
    difference: float,
    power: float = 0.8,
    level: float = 0.05,
    mixtures: int = 2,
    repeat_degrees: int = 0,
) -> int:
    """Fewest seeds for each mixture that reach `power`; as `power_of_seeds`. Raises ValueError beyond MOST_SEEDS."""
    if noise <= 0 or difference == 0:
        raise ValueError("noise must be above 0, and the difference other than 0")

    def reached(seeds: int) -> bool:
        return power_of_seeds(noise, difference, seeds, mixtures, level, repeat_degrees) >= power

    low, high = 0, 1
    while not reached(high):
        if high >= MOST_SEEDS:
            raise ValueError(f"a difference of {difference} in a noise of {noise} takes more than {MOST_SEEDS:,} seeds")
        low, high = high, high * 2
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if reached(middle) else (middle, high)
    return high


@dataclass(frozen=True)
class Needs:
    """What it takes to see a difference."""

    difference: float  # bits per byte
    noise: float  # of one run
    mixtures: int
    confidence: float
    power: float
    repeats: int  # of a control, beyond the seeds
    seeds: int  # of each mixture
    runs: int
    tokens: int  # trained on, all runs together
    power_now: float | None  # with the seeds that the file has
    seeds_now: int | None
    held_out_bytes: int | None  # of scored text, for the test over documents; None where its noise is not known

    def data(self) -> dict[str, Any]:
        return asdict(self)

    def lines(self) -> list[str]:
        out = [
            f"To tell {self.mixtures} mixtures apart that differ by {self.difference:g} bits per byte, with power "
            f"{self.power:.0%} at {self.confidence:.0%} confidence, where one run varies by {self.noise:.4g}:",
            f"  {self.seeds} seeds each, {self.runs} runs, {self.tokens:,} tokens of training in all",
        ]
        if self.power_now is not None:
            out.append(f"  with the {self.seeds_now} seeds of the file the power is {self.power_now:.0%}")
        if self.held_out_bytes is not None:
            out.append(f"  {self.held_out_bytes:,} bytes of scored text, for the test over documents")
        return out


def needs(
    noise: float,
    difference: float,
    mixtures: int,
    budget_tokens: int,
    confidence: float = 0.95,
    power: float = 0.8,
    repeats: int = 0,
    seeds_now: int | None = None,
    documents_error: float | None = None,
    scored_bytes: int | None = None,
) -> Needs:
    """budget_tokens: of one run. documents_error: standard error over documents of a difference, with scored_bytes."""
    level, degrees = 1 - confidence, max(0, repeats - 1)
    seeds = seeds_needed(noise, difference, power, level, mixtures, degrees)
    size = None
    if documents_error is not None and scored_bytes is not None:
        pairs = mixtures * (mixtures - 1) // 2
        wanted = scipy_stats.norm.ppf(1 - level / pairs / 2) + scipy_stats.norm.ppf(power)  # in standard errors
        size = math.ceil(scored_bytes * (documents_error * float(wanted) / difference) ** 2)
    runs = mixtures * seeds + repeats
    now = None
    if seeds_now is not None:
        now = power_of_seeds(noise, difference, seeds_now, mixtures, level, degrees)
    return Needs(
        difference=difference,
        noise=noise,
        mixtures=mixtures,
        confidence=confidence,
        power=power,
        repeats=repeats,
        seeds=seeds,
        runs=runs,
        tokens=runs * budget_tokens,
        power_now=now,
        seeds_now=seeds_now,
        held_out_bytes=size,
    )
