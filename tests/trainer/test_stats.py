"""Statistics against SciPy and against numbers worked out by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats as scipy_stats

from gristmill.trainer import stats
from gristmill.trainer.score import Texts


def test_t_interval_by_hand():
    # mean 3, sd 1, n 3: half width 4.302653 * 1 / sqrt(3)
    got = stats.t_interval([2.0, 3.0, 4.0])
    assert got.mean == 3.0
    assert got.high - got.mean == pytest.approx(4.3026527 / math.sqrt(3), rel=1e-6)
    assert got.excludes(0.0)
    assert not got.excludes(1.0)
    alone = stats.t_interval([2.0])
    assert alone.mean == 2.0
    assert math.isnan(alone.low)
    assert not alone.excludes(0.0)
    with pytest.raises(ValueError, match="at least one value"):
        stats.t_interval([])


@given(st.lists(st.floats(-5, 5), min_size=2, max_size=8).filter(lambda v: np.std(v) > 1e-3))
def test_t_interval_equals_scipy(values):
    low, high = scipy_stats.t.interval(0.9, len(values) - 1, loc=np.mean(values), scale=scipy_stats.sem(values))
    got = stats.t_interval(values, 0.9)
    assert (got.low, got.high) == (pytest.approx(low, abs=1e-9), pytest.approx(high, abs=1e-9))


def test_two_mixtures_are_the_paired_t_test():
    rng = np.random.default_rng(1)
    for seeds in (2, 3, 7):
        table = rng.normal(1.3, 0.02, (2, seeds))
        (ours,) = stats.seed_tests(table)
        theirs = scipy_stats.ttest_rel(table[0], table[1])
        assert ours.p == pytest.approx(theirs.pvalue, rel=1e-9)
        assert ours.degrees == seeds - 1
        interval, expected = ours.interval(), theirs.confidence_interval(0.95)
        assert (interval.low, interval.high) == (pytest.approx(expected.low), pytest.approx(expected.high))


def test_three_mixtures_share_their_noise_by_hand():
    # Row effects 0, 1, 3; column effects 0, 0.2; residuals +-0.1 in the first two rows, none in the third.
    table = np.array([[0.1, 0.1], [0.9, 1.3], [3.0, 3.2]])
    noise, degrees = stats.seed_noise(table)
    assert degrees == 2
    assert noise == pytest.approx(math.sqrt(4 * 0.1**2 / 2))
    first = stats.seed_tests(table)[0]
    assert (first.first, first.second) == (0, 1)
    assert first.difference == pytest.approx(-1.0)
    assert first.standard_error == pytest.approx(noise)  # sqrt(2 / 2 seeds)
    assert first.p == pytest.approx(2 * scipy_stats.t.sf(1 / noise, 2))


def test_without_spread_nothing_is_claimed():
    one_seed = stats.seed_tests(np.array([[1.0], [2.0]]))[0]
    assert math.isnan(one_seed.p)
    assert math.isnan(one_seed.interval().low)
    copies = stats.seed_tests(np.array([[1.0, 2.0], [1.0, 2.0]]))[0]
    assert copies.p == 1.0
    shifted = stats.seed_tests(np.array([[1.0, 2.0], [1.5, 2.5]]))[0]
    assert shifted.p == 0.0
    assert math.isnan(stats.seed_noise(np.array([[1.0, 2.0]]))[0])


def test_holm_by_hand():
    # sorted .01 .02 .03 .04 -> .04 .06 .06 .06
    assert stats.holm([0.04, 0.01, 0.03, 0.02]) == pytest.approx([0.06, 0.04, 0.06, 0.06])
    assert stats.holm([0.6, 0.7]) == [1.0, 1.0]
    assert stats.holm([]) == []
    adjusted = stats.holm([math.nan, 0.01])
    assert math.isnan(adjusted[0])
    assert adjusted[1] == 0.01


@given(st.lists(st.floats(0, 1), min_size=1, max_size=10))
def test_holm_lies_between_raw_and_bonferroni(p):
    adjusted = stats.holm(p)
    assert all(a >= b for a, b in zip(adjusted, p, strict=True))
    assert all(a <= min(1.0, len(p) * b) + 1e-12 for a, b in zip(adjusted, p, strict=True))
    assert np.argsort(p, kind="stable").tolist() == sorted(range(len(p)), key=lambda i: (adjusted[i], p[i], i))


def texts(rng, documents, shift=0.0):
    sizes = rng.integers(50, 400, documents)
    return Texts(sizes * (1.2 + shift + rng.normal(0, 0.2, documents)), sizes)


def test_bootstrap_agrees_with_scipy_and_theory():
    rng = np.random.default_rng(3)
    sample = texts(rng, 120)
    draws = stats.bootstrap_scores([[sample]], draws=4_000, seed=1)[0]
    theirs = scipy_stats.bootstrap(
        (sample.bits, sample.bytes),
        lambda bits, size, axis: bits.sum(axis) / size.sum(axis),
        paired=True,
        vectorized=True,
        n_resamples=4_000,
        method="percentile",
        rng=np.random.default_rng(2),
    )
    ours = stats.percentile_interval(sample.bits_per_byte, draws)
    assert ours.mean == pytest.approx(sample.bits.sum() / sample.bytes.sum())
    assert draws.std() == pytest.approx(theirs.standard_error, rel=0.06)
    assert ours.low == pytest.approx(theirs.confidence_interval.low, abs=0.2 * draws.std())
    assert ours.high == pytest.approx(theirs.confidence_interval.high, abs=0.2 * draws.std())


def test_differences_are_paired_and_sources_weigh_alike():
    rng = np.random.default_rng(4)
    big, small = texts(rng, 300), texts(rng, 40)
    better = [Texts(t.bits - 0.01 * t.bytes, t.bytes) for t in (big, small)]
    draws = stats.bootstrap_scores([[big, better[0]], [small, better[1]]], draws=500)
    # The same documents are drawn for both models, so a constant shift has no spread.
    np.testing.assert_allclose(draws[0] - draws[1], 0.01, atol=1e-12)
    assert draws[0].mean() == pytest.approx((big.bits_per_byte + small.bits_per_byte) / 2, abs=0.02)
    assert np.array_equal(draws, stats.bootstrap_scores([[big, better[0]], [small, better[1]]], draws=500))


def test_bootstrap_p():
    assert stats.bootstrap_p(np.full(999, 0.3)) == pytest.approx(2 / 1000)
    assert stats.bootstrap_p(np.zeros(99)) == 1.0
    assert stats.bootstrap_p(np.concatenate([np.full(90, 1.0), np.full(9, -1.0)])) == pytest.approx(2 * 10 / 100)


def test_noise_of_repeats_is_pooled_by_hand():
    # Residuals +-0.1 in two rows: squares 0.04, 2 degrees. Repeats 1, 2, 3: squares 2, 2 degrees.
    table = np.array([[0.1, 0.1], [0.9, 1.3], [3.0, 3.2]])
    noise, degrees = stats.pooled_noise(table, [1.0, 2.0, 3.0])
    assert degrees == 4
    assert noise == pytest.approx(math.sqrt(2.04 / 4))
    assert stats.pooled_noise(table, [1.0]) == stats.seed_noise(table)
    alone = stats.pooled_noise(np.array([[1.0], [2.0]]), [1.0, 1.2])
    assert alone == (pytest.approx(0.1 * math.sqrt(2)), 1)
    one_seed = stats.seed_tests(np.array([[1.0], [2.0]]), [1.0, 1.02, 0.98, 1.01])[0]
    assert one_seed.degrees == 3
    assert one_seed.p < 0.001  # 1.0 in a noise of 0.017
    assert stats.smallest_difference(0.1, 4, 2) == pytest.approx(2.7764451 * 0.1)
    assert math.isnan(stats.smallest_difference(math.nan, 0, 1))
