"""From the scores of small runs to a function of the mixture: a panel of regressors, and which to trust.

    panel = fit_panel(weights, scores)           # (n, k) shares that sum to 1, (n,) scores, lower is better
    panel.choice, panel.error                    # "exponential", and its root mean square error on runs left out
    panel.predict(others)                        # (m,)

Members: the exponential law c + exp(t . w) of Ye et al. 2024 ("Data Mixing Laws"), ridge regression on the shares and
their square roots, and LightGBM as RegMix has it (Liu et al. 2024) but with small leaves, because its default of 20
runs a leaf learns nothing from 64 runs. `mean` is the mean of the three. Which of the four is used is decided by cross
validation; what the choice is worth is measured on runs that took no part in it (nested cross-validation).

Packages of the extra `suggest` are imported when a model is fitted.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy.optimize import least_squares
from scipy.stats import rankdata

from gristmill.mixtures.plan import MixtureError

Predict = Callable[[np.ndarray], np.ndarray]
MEAN = "mean"
MIN_RUNS = 10  # two runs a fold in both loops
_ALPHAS = np.logspace(-6, 2, 17)  # of ridge regression on standardised columns


@dataclass(frozen=True)
class Panel:
    """Fitted members, the choice among them, and what it is worth."""

    members: Mapping[str, Predict]
    choice: str
    errors: Mapping[str, float]  # of each member: root mean square, cross-validated
    error: float  # of the choice, nested: the runs it is measured on took no part in choosing
    spearman: float  # of the nested predictions with the scores
    residuals: np.ndarray  # (n,) score minus nested prediction

    def predict(self, weights: np.ndarray) -> np.ndarray:
        """Scores (m,) of mixtures (m, k)."""
        return predict_as(self.members, self.choice, weights)


def predict_as(members: Mapping[str, Predict], choice: str, weights: np.ndarray) -> np.ndarray:
    """Scores (m,) of mixtures (m, k) by one member, or by the mean of all."""
    if choice == MEAN:
        return np.mean([predict(weights) for predict in members.values()], axis=0)
    return members[choice](weights)


def fit_panel(weights: np.ndarray, scores: np.ndarray, seed: int = 0, folds: int = 5) -> Panel:
    """Fits every member and chooses. weights (n, k) float64, scores (n,) float64.

    Raises MixtureError with fewer than MIN_RUNS runs or scores that are no numbers.
    """
    weights, scores = np.asarray(weights, np.float64), np.asarray(scores, np.float64)
    if len(scores) < MIN_RUNS:
        raise MixtureError(
            f"{len(scores)} runs are too few for a panel of regressors: it needs {MIN_RUNS}, and 64 or more to be of "
            "use. Write more mixtures with `gristmill mixture swarm` and train them."
        )
    if not (np.isfinite(weights).all() and np.isfinite(scores).all()):
        raise MixtureError("A weight or a score of the runs is no finite number: look for failed runs.")
    nested = np.empty(len(scores))
    for train, test in splits(len(scores), folds, seed):
        choice, _ = _choose(weights[train], scores[train], folds, seed + 1)
        nested[test] = predict_as(fit_members(weights[train], scores[train], seed), choice, weights[test])
    choice, errors = _choose(weights, scores, folds, seed)
    return Panel(
        members=fit_members(weights, scores, seed),
        choice=choice,
        errors=errors,
        error=float(np.sqrt(np.mean((scores - nested) ** 2))),
        spearman=spearman(scores, nested),
        residuals=scores - nested,
    )


def splits(n: int, folds: int, seed: int) -> list[tuple[np.ndarray, np.ndarray]]:
    """(train, test) indices of each fold; every index is in one test part."""
    parts = np.array_split(np.random.default_rng(seed).permutation(n), folds)
    return [(np.concatenate([p for j, p in enumerate(parts) if j != i]), part) for i, part in enumerate(parts)]


def spearman(a: np.ndarray, b: np.ndarray) -> float:
    """Rank correlation, ties at their mean rank; 0 where one side is constant."""
    ranks_a, ranks_b = rankdata(a), rankdata(b)
    if ranks_a.std() == 0 or ranks_b.std() == 0:
        return 0.0
    return float(np.corrcoef(ranks_a, ranks_b)[0, 1])


def _choose(weights: np.ndarray, scores: np.ndarray, folds: int, seed: int) -> tuple[str, dict[str, float]]:
    """The candidate with the least cross-validated error, and the error of each."""
    out: dict[str, np.ndarray] = {}
    for train, test in splits(len(scores), folds, seed):
        members = fit_members(weights[train], scores[train], seed)
        for name in (*members, MEAN):
            out.setdefault(name, np.empty(len(scores)))[test] = predict_as(members, name, weights[test])
    errors = {name: float(np.sqrt(np.mean((scores - guess) ** 2))) for name, guess in out.items()}
    return min(errors, key=lambda name: errors[name]), errors


def fit_members(weights: np.ndarray, scores: np.ndarray, seed: int = 0) -> dict[str, Predict]:
    """Every member of the panel, fitted."""
    return {
        "exponential": fit_exponential(weights, scores),
        "ridge": fit_ridge(weights, scores),
        "lightgbm": fit_lightgbm(weights, scores, seed),
    }


def fit_exponential(weights: np.ndarray, scores: np.ndarray) -> Predict:
    """score = c + exp(t . w), by least squares on the score, with a weak penalty on the spread of t.

    The factor of the paper's k exp(t . w) is in t, because the shares sum to 1. Starts are linear fits of
    log(score - c) for several c below the least score.
    """
    low, high = float(scores.min()), float(scores.max())
    scale = float(scores.std()) or 1.0
    penalty = 0.01
    k = weights.shape[1]
    centre = np.eye(k) - 1 / k

    def residuals(at: np.ndarray) -> np.ndarray:
        fault = (at[0] + np.exp(np.minimum(weights @ at[1:], 50)) - scores) / scale
        return np.concatenate([fault, penalty * (centre @ at[1:])])

    def jacobian(at: np.ndarray) -> np.ndarray:
        slope = np.exp(np.minimum(weights @ at[1:], 50))[:, None] / scale
        rows = np.hstack([np.full((len(scores), 1), 1 / scale), slope * weights])
        return np.vstack([rows, np.hstack([np.zeros((k, 1)), penalty * centre])])

    best: Any = None
    for below in (0.1, 0.5, 2.0):
        floor = low - below * max(high - low, 1e-9)
        logs = np.log(scores - floor)
        start = np.linalg.solve(weights.T @ weights + 1e-3 * np.eye(k), weights.T @ (logs - logs.mean()))
        found = least_squares(
            residuals, np.concatenate([[floor], start + logs.mean()]), jacobian, loss="soft_l1", max_nfev=200
        )
        if best is None or found.cost < best.cost:
            best = found
    at = best.x
    return lambda others: at[0] + np.exp(np.minimum(np.asarray(others) @ at[1:], 50))


def fit_ridge(weights: np.ndarray, scores: np.ndarray) -> Predict:
    """Ridge regression on the shares and their square roots; the penalty by leave-one-out."""
    from sklearn.linear_model import RidgeCV
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    model = make_pipeline(StandardScaler(), RidgeCV(alphas=_ALPHAS)).fit(_roots(weights), scores)
    return lambda others: np.asarray(model.predict(_roots(np.asarray(others))))


def _roots(weights: np.ndarray) -> np.ndarray:
    return np.hstack([weights, np.sqrt(np.maximum(weights, 0))])


def fit_lightgbm(weights: np.ndarray, scores: np.ndarray, seed: int = 0) -> Predict:
    """Boosted trees with at least 3 runs a leaf; a fixed number of rounds, so nothing is stopped on what is tested."""
    import lightgbm

    settings = {
        "objective": "regression",
        "learning_rate": 0.05,
        "num_leaves": 8,
        "min_data_in_leaf": 3,
        "min_data_in_bin": 1,
        "feature_fraction": 0.7,
        "num_threads": 1,
        "seed": seed,
        "deterministic": True,
        "force_col_wise": True,
        "verbosity": -1,
    }
    booster = lightgbm.train(settings, lightgbm.Dataset(weights, scores), num_boost_round=400)
    return lambda others: np.asarray(booster.predict(np.asarray(others)))
