"""How many seeds: against published figures, and against the ranking's own tests on simulated ablations."""

from __future__ import annotations

import math

import numpy as np
import pytest

from gristmill.trainer import stats
from gristmill.trainer.power import needs, power_of_seeds, seeds_needed


def test_known_figures():
    # Cohen's d of the difference 1.0: 10 pairs give a power of .803, 9 give .748 (G*Power).
    assert seeds_needed(noise=1 / math.sqrt(2), difference=1.0) == 10
    assert power_of_seeds(1 / math.sqrt(2), 1.0, 10) == pytest.approx(0.803, abs=0.001)
    assert power_of_seeds(1 / math.sqrt(2), 1.0, 9) == pytest.approx(0.748, abs=0.001)
    assert seeds_needed(0.001, 1.0) == 2
    assert power_of_seeds(0.1, 1.0, 1) == 0.0
    with pytest.raises(ValueError, match="above 0"):
        seeds_needed(0.0, 1.0)
    with pytest.raises(ValueError, match="more than 10,000 seeds"):
        seeds_needed(1.0, 1e-4)


def found_share(noise: float, difference: float, seeds: int, mixtures: int, repeats: int, trials: int = 3_000) -> float:
    """How often Holm's procedure over all pairs tells the first mixture from the second. The others lie between."""
    rng = np.random.default_rng(7)
    levels = np.linspace(0, difference, mixtures)
    pairs = [(a, b) for a in range(mixtures) for b in range(a + 1, mixtures)]
    target = pairs.index((0, mixtures - 1))
    found = 0
    for _ in range(trials):
        table = levels[:, None] + rng.normal(0, 0.3, seeds) + rng.normal(0, noise, (mixtures, seeds))
        again = rng.normal(0, noise, repeats) if repeats else ()
        adjusted = stats.holm([test.p for test in stats.seed_tests(table, again)])
        found += adjusted[target] < 0.05
    return found / trials


@pytest.mark.parametrize(
    ("noise", "difference", "mixtures", "repeats"), [(0.01, 0.02, 2, 0), (0.01, 0.012, 2, 0), (0.01, 0.02, 2, 5)]
)
def test_two_mixtures_in_simulation(noise, difference, mixtures, repeats):
    seeds = seeds_needed(noise, difference, mixtures=mixtures, repeat_degrees=max(0, repeats - 1))
    expected = power_of_seeds(noise, difference, seeds, mixtures, repeat_degrees=max(0, repeats - 1))
    assert found_share(noise, difference, seeds, mixtures, repeats) == pytest.approx(expected, abs=0.025)
    assert expected >= 0.8
    fewer = power_of_seeds(noise, difference, seeds - 1, mixtures, repeat_degrees=max(0, repeats - 1))
    assert fewer < 0.8


def test_several_mixtures_need_no_more_than_what_is_said():
    """Bonferroni bounds Holm from below, so simulation finds at least the promised share."""
    seeds = seeds_needed(0.01, 0.02, mixtures=4)
    expected = power_of_seeds(0.01, 0.02, seeds, 4)
    assert expected - 0.02 <= found_share(0.01, 0.02, seeds, 4, 0, trials=1_500) <= expected + 0.1
    # Four mixtures share their noise: fewer seeds each than two would need at the level of one of six pairs.
    assert seeds <= seeds_needed(0.01, 0.02, level=0.05 / 6)


def test_repeats_of_a_control_save_seeds():
    assert seeds_needed(0.01, 0.04) == 4
    assert seeds_needed(0.01, 0.04, repeat_degrees=5) == 2
    assert power_of_seeds(0.01, 0.06, 1, repeat_degrees=5) > 0.9  # one seed is enough for a large difference


def test_what_is_needed_in_all():
    found = needs(0.01, 0.02, 3, 1_000_000, repeats=4, seeds_now=2, documents_error=0.005, scored_bytes=100_000)
    assert found.runs == 3 * found.seeds + 4
    assert found.tokens == found.runs * 1_000_000
    assert found.power_now == pytest.approx(power_of_seeds(0.01, 0.02, 2, 3, repeat_degrees=3))
    # (2.394 + 0.842) standard errors of 0.005 are 0.01618, less than 0.02: fewer bytes are enough.
    assert found.held_out_bytes == pytest.approx(100_000 * (0.005 * (2.39398 + 0.84162) / 0.02) ** 2, abs=2)
    assert found.data()["seeds"] == found.seeds
    text = "\n".join(found.lines())
    assert f"{found.seeds} seeds each, {found.runs} runs, {found.tokens:,} tokens" in text
    assert "bytes of scored text" in text
