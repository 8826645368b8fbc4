"""A proposal from finished runs: the mixture with the best predicted score under repetition caps.

    proposal = suggest(sources, weights, scores, limit)
    proposal.weights, proposal.score, proposal.low, proposal.high, proposal.warnings

The search starts from random mixtures and from the best runs, goes on from the mean of the best predicted ones, as
RegMix does, and then moves share from one source to another as long as the prediction gets better. A score that is a
mean over targets has a panel for each of them: a mean of laws is not a law of the same form.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from gristmill.mixtures.regressors import Panel, fit_panel, spearman
from gristmill.mixtures.swarm import NARROW, capped, swarm

CANDIDATES = 4000
AVERAGED = 64  # best candidates whose mean is a start of its own
_STEPS = (0.1, 0.03, 0.01, 0.003, 0.001)  # shares moved from one source to another


@dataclass(frozen=True)
class Proposal:
    """See the top of this module."""

    sources: tuple[str, ...]
    weights: np.ndarray  # (k,) shares
    score: float  # predicted
    low: float  # of the prediction interval
    high: float
    best_run: float  # the best score that was measured
    panels: tuple[Panel, ...]  # one a target
    error: float  # root mean square of the predicted mean, on runs left out
    spearman: float  # of predicted and measured means, on runs left out
    warnings: tuple[str, ...]


def suggest(
    sources: Sequence[str],
    weights: np.ndarray,
    scores: np.ndarray,
    limit: np.ndarray | None = None,
    seed: int = 0,
    confidence: float = 0.95,
    folds: int = 5,
) -> Proposal:
    """weights (n, k) of finished runs, scores (n,) or (n, targets) whose mean counts; lower is better.

    limit (k,) are the largest shares.
    The interval is the prediction plus quantiles of the nested cross-validation's residuals. It holds for mixtures
    like those of the runs; `warnings` say where the proposal is not. Raises MixtureError with too few runs.
    """
    weights, scores = np.asarray(weights, np.float64), np.asarray(scores, np.float64)
    limit = np.ones(weights.shape[1]) if limit is None else limit
    columns = scores.reshape(len(scores), -1)
    panels = tuple(fit_panel(weights, column, seed, folds) for column in columns.T)
    scores = columns.mean(1)

    def predict(others: np.ndarray) -> np.ndarray:
        return np.mean([panel.predict(others) for panel in panels], axis=0)

    best = search(predict, weights, scores, limit, seed)
    score = float(predict(best[None])[0])
    residuals = np.mean([panel.residuals for panel in panels], axis=0)
    error, ranks = float(np.sqrt(np.mean(residuals**2))), spearman(scores, scores - residuals)
    tail = (1 - confidence) / 2
    low, high = np.quantile(residuals, [tail, 1 - tail])
    return Proposal(
        sources=tuple(sources),
        weights=best,
        score=score,
        low=score + float(low),
        high=score + float(high),
        best_run=float(scores.min()),
        panels=panels,
        error=error,
        spearman=ranks,
        warnings=tuple(extrapolation(sources, weights, scores, best, score, error, ranks)),
    )


def search(
    predict: Callable[[np.ndarray], np.ndarray],
    weights: np.ndarray,
    scores: np.ndarray,
    limit: np.ndarray,
    seed: int = 0,
) -> np.ndarray:
    """The mixture (k,) with the least prediction found under the limit (k,)."""
    best_runs = weights[np.argsort(scores)[:4]]
    seen = np.where((weights > 0).any(0), limit, 0.0)  # nothing is known of a source that no run had
    pools = [weights, swarm(weights.mean(0), CANDIDATES, seed, seen)]
    pools += [swarm(run, CANDIDATES // 4, seed + i + 1, limit, NARROW) for i, run in enumerate(capped(best_runs, seen))]
    pool = capped(np.vstack(pools), seen)
    ranked = pool[np.argsort(predict(pool), kind="stable")]
    starts = [ranked[0], capped(ranked[:AVERAGED].mean(0), seen)[0]]
    ends = np.array([_descend(predict, start, seen) for start in starts])
    return np.asarray(ends[np.argmin(predict(ends))])


def _descend(predict: Callable[[np.ndarray], np.ndarray], start: np.ndarray, limit: np.ndarray) -> np.ndarray:
    """Moves share between two sources, the best pair each time, with steps that get smaller."""
    at, value = start, float(predict(start[None])[0])
    k = len(at)
    giving, taking = (axis.ravel() for axis in np.meshgrid(np.arange(k), np.arange(k)))
    for step in _STEPS:
        for _ in range(200):
            moved = np.minimum(np.minimum(step, at[giving]), limit[taking] - at[taking])
            pairs = np.flatnonzero((moved > 1e-9) & (giving != taking))
            if not len(pairs):
                break
            others = np.repeat(at[None], len(pairs), axis=0)
            rows = np.arange(len(pairs))
            others[rows, giving[pairs]] -= moved[pairs]
            others[rows, taking[pairs]] += moved[pairs]
            values = predict(others)
            if values.min() >= value - 1e-12:
                break
            at, value = others[values.argmin()], float(values.min())
    return at


def extrapolation(
    sources: Sequence[str],
    weights: np.ndarray,
    scores: np.ndarray,
    proposed: np.ndarray,
    score: float,
    error: float,
    ranks: float,
) -> list[str]:
    """What is outside of what was measured: distance, single shares, and the predicted score."""
    out = []
    distances = np.abs(weights[:, None] - weights[None]).sum(2) / 2
    np.fill_diagonal(distances, np.inf)
    usual = float(np.quantile(distances.min(1), 0.95))
    nearest = float(np.abs(weights - proposed).sum(1).min() / 2)
    if nearest > usual:
        out.append(
            f"extrapolation: {nearest:.0%} of the tokens would have to move from the nearest run to the proposal; 95 % "
            f"of the runs have a neighbour within {usual:.0%}"
        )
    for name, share, highest in zip(sources, proposed, weights.max(0), strict=True):
        if share > highest + 1e-6:
            out.append(f"extrapolation: {name} at {share:.1%}, in no run above {highest:.1%}")
    if score < scores.min() - 2 * error:
        out.append(
            f"extrapolation: predicted {score:.4f} is far below the best run, {scores.min():.4f}; train it to be sure"
        )
    if ranks < 0.8:
        out.append(f"the panel ranks runs left out with Spearman {ranks:.2f} only: train more runs")
    return out
