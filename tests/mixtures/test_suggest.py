"""The swarm, the panel of regressors, and the proposal, on mixing laws whose optimum is known."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.optimize import minimize

from gristmill.mixtures.plan import MixtureError
from gristmill.mixtures.regressors import fit_exponential, fit_panel, predict_as, spearman, splits
from gristmill.mixtures.suggest import suggest
from gristmill.mixtures.swarm import NARROW, capped, caps, swarm

SOURCES = ("web", "code", "books", "forum", "papers")


def targets(weights: np.ndarray) -> np.ndarray:
    """Scores (n, 3) of a mixing law (Ye et al. 2024)."""
    t = np.array([[-2.0, 0.5, -0.5, -0.2, 0.3], [0.4, -3.0, 0.2, 0.1, -0.4], [-0.3, 0.3, -2.5, -0.6, 0.1]])
    return 2.0 + np.exp(np.atleast_2d(weights) @ t.T)


def law(weights: np.ndarray) -> np.ndarray:
    """Their mean: its optimum is inside the simplex."""
    return targets(weights).mean(1)


def optimum(limit: np.ndarray) -> float:
    """The least value of the law under caps, by another method: it is convex, so SLSQP finds it."""
    found = minimize(
        lambda w: law(w)[0],
        capped(np.full((1, 5), 0.2), limit)[0],
        bounds=[(0, each) for each in limit],
        constraints={"type": "eq", "fun": lambda w: w.sum() - 1},
        options={"ftol": 1e-12},
    )
    return float(found.fun)


@pytest.mark.parametrize("limit", [np.ones(5), np.array([0.25, 0.3, 0.2, 1.0, 1.0])], ids=["free", "capped"])
def test_regret_on_a_known_law_is_below_one_percent_of_the_spread(limit: np.ndarray) -> None:
    weights = swarm(np.full(5, 0.2), 64, seed=3, limit=limit)
    noise = np.random.default_rng(0).normal(0, 0.001, (64, 3))
    proposal = suggest(SOURCES, weights, targets(weights) + noise, limit, folds=3)
    regret = law(proposal.weights)[0] - optimum(limit)
    assert -1e-6 < regret < 0.01 * np.ptp(law(weights))
    assert proposal.weights.sum() == pytest.approx(1)
    assert (proposal.weights <= limit + 1e-9).all()
    assert proposal.low <= proposal.score <= proposal.high


def test_a_second_round_is_no_worse_than_the_first() -> None:
    first = swarm(np.full(5, 0.2), 32, seed=1)
    one = suggest(SOURCES, first, targets(first), folds=3)
    second = swarm(one.weights, 32, seed=2, strengths=NARROW)
    both = np.vstack([first, second])
    two = suggest(SOURCES, both, targets(both), folds=3)
    assert np.abs(second - one.weights).sum(1).mean() < np.abs(first - one.weights).sum(1).mean()
    assert law(two.weights)[0] <= law(one.weights)[0] + 1e-4


def test_a_proposal_beyond_the_runs_is_said_to_be_one() -> None:
    weights = swarm(np.array([0.02, 0.02, 0.32, 0.32, 0.32]), 48, seed=1, strengths=NARROW)
    scores = 3 - weights[:, 0]  # more web is always better, and no run had much of it
    proposal = suggest(SOURCES, weights, scores, folds=3)
    assert proposal.weights[0] > weights[:, 0].max()
    assert any(warning.startswith("extrapolation: web at") for warning in proposal.warnings)


def test_scores_without_a_law_are_said_to_be_unranked() -> None:
    weights = swarm(np.full(5, 0.2), 40, seed=1)
    proposal = suggest(SOURCES, weights, np.random.default_rng(1).normal(3, 0.1, 40), folds=3)
    assert any("train more runs" in warning for warning in proposal.warnings)


def test_the_exponential_law_is_found_again() -> None:
    weights = swarm(np.full(5, 0.2), 64, seed=5)
    t = np.array([-2.0, 0.5, -0.5, 0.2, 0.0])
    others = swarm(np.full(5, 0.2), 32, seed=6)
    predict = fit_exponential(weights, 2 + np.exp(weights @ t))
    np.testing.assert_allclose(predict(others), 2 + np.exp(others @ t), atol=5e-3)


def test_the_choice_is_the_candidate_with_the_least_error_and_its_own_error_is_of_unseen_runs() -> None:
    weights = swarm(np.full(5, 0.2), 40, seed=2)
    panel = fit_panel(weights, law(weights))
    assert panel.errors[panel.choice] == min(panel.errors.values())
    assert set(panel.errors) == {"exponential", "ridge", "lightgbm", "mean"}
    assert panel.error == pytest.approx(np.sqrt(np.mean(panel.residuals**2)))
    mean = np.mean([predict(weights) for predict in panel.members.values()], axis=0)
    np.testing.assert_allclose(predict_as(panel.members, "mean", weights), mean)


def test_too_few_runs_and_scores_that_are_no_numbers_are_refused() -> None:
    weights = swarm(np.full(5, 0.2), 12, seed=0)
    with pytest.raises(MixtureError, match="9 runs are too few"):
        fit_panel(weights[:9], law(weights[:9]))
    with pytest.raises(MixtureError, match="no finite number"):
        fit_panel(weights, np.full(12, np.nan))


def test_splits_test_every_run_once() -> None:
    parts = splits(13, 5, seed=1)
    assert sorted(np.concatenate([test for _, test in parts])) == list(range(13))
    assert all(not set(train) & set(test) for train, test in parts)


def test_spearman_by_hand() -> None:
    assert spearman(np.array([1.0, 2, 3, 4]), np.array([1.0, 3, 2, 4])) == pytest.approx(0.8)  # 1 - 6 * 2 / 60
    assert spearman(np.array([1.0, 2, 3]), np.ones(3)) == 0.0


def test_caps_by_hand() -> None:
    found = caps(("web", "code"), {"web": 1000, "code": 50}, target_tokens=1000, max_epochs=4)
    np.testing.assert_allclose(found, [1.0, 0.2])
    with pytest.raises(MixtureError, match="they give 4,200"):
        caps(("web", "code"), {"web": 1000, "code": 50}, target_tokens=5000, max_epochs=4)
    with pytest.raises(MixtureError, match="'code' is not among"):
        caps(("web", "code"), {"web": 1000}, target_tokens=10, max_epochs=4)


def test_projection_by_hand() -> None:
    np.testing.assert_allclose(capped(np.array([0.8, 0.2, 0.0]), np.array([0.5, 1, 1])), [[0.5, 0.35, 0.15]], atol=1e-9)


@given(st.integers(0, 1000), st.integers(1, 8), st.floats(1.05, 4))
def test_a_swarm_is_of_mixtures_under_the_caps(seed: int, k: int, room: float) -> None:
    limit = np.minimum(1.0, np.random.default_rng(seed).dirichlet(np.ones(k)) * room + 0.05)
    if limit.sum() < 1:
        limit = np.ones(k)
    prior = np.full(k, 1 / k)
    weights = swarm(prior, 6, seed, limit)
    np.testing.assert_allclose(weights.sum(1), 1, atol=1e-9)
    assert (weights >= 0).all()
    assert (weights <= limit + 1e-9).all()
    np.testing.assert_array_equal(weights, swarm(prior, 6, seed, limit))


def test_a_swarm_has_the_prior_as_its_mean_and_leaves_out_what_it_leaves_out() -> None:
    weights = swarm(np.array([0.6, 0.3, 0.1, 0.0]), 4000, seed=1)
    np.testing.assert_allclose(weights.mean(0), [0.6, 0.3, 0.1, 0], atol=0.02)
    with pytest.raises(MixtureError, match="prior"):
        swarm(np.array([-1.0, 2.0]), 3, seed=1)
