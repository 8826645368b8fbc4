"""Random mixtures around a prior, to train small models on: what `suggest` learns from.

    weights = swarm(prior, runs=64, seed=1, caps=caps(available, target_tokens, max_epochs=4))    # (64, k)

Each mixture is a draw from a Dirichlet distribution whose mean is the prior, with a strength of its own, drawn
log-uniformly: as RegMix does it (Liu et al. 2024, section 3.1), with 0.1 to 5 times the number of sources. Strong
draws stay near the prior, weak ones go to the corners. A later round takes the proposal of the one before as its prior
and NARROW strengths.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from gristmill.mixtures.plan import MixtureError

WIDE = (0.1, 5.0)  # strengths per source
NARROW = (5.0, 50.0)
NEGLIGIBLE = 0.001  # shares below are set to 0: less than a window of a small run


def caps(
    sources: Sequence[str], available: Mapping[str, int], target_tokens: int | None, max_epochs: float
) -> np.ndarray:
    """The largest share (k,) of each source in a run of target_tokens that sees it max_epochs times.

    available: tokens of each source. Without a target all are 1. Raises MixtureError where a source is unknown, or
    where the caps leave less than the whole run.
    """
    if target_tokens is None:
        return np.ones(len(sources))
    missing = [name for name in sources if name not in available]
    if missing:
        raise MixtureError(
            f"Source {missing[0]!r} is not among the token shards, so its repetition cannot be capped. They have: "
            f"{', '.join(sorted(available))}."
        )
    out = np.minimum(1.0, [max_epochs * available[name] / target_tokens for name in sources])
    if out.sum() < 1:
        most = sum(max_epochs * available[name] for name in sources)
        raise MixtureError(
            f"{target_tokens:,} tokens need more than {max_epochs:g} epochs of every source: with that cap they give "
            f"{most:,.0f}. Lower --target-tokens or raise --max-epochs."
        )
    return out


def capped(weights: np.ndarray, limit: np.ndarray) -> np.ndarray:
    """The nearest mixtures (m, k) that sum to 1 and lie between 0 and the limit (k,): Euclidean projection.

    It is clip(w - shift, 0, limit) for one shift a mixture, found by bisection.
    """
    weights = np.atleast_2d(np.asarray(weights, np.float64))
    low = (weights - limit).min(1, keepdims=True) - 1.0
    high = weights.max(1, keepdims=True)
    for _ in range(60):
        middle = (low + high) / 2
        over = np.clip(weights - middle, 0, limit).sum(1, keepdims=True) > 1
        low, high = np.where(over, middle, low), np.where(over, high, middle)
    return np.clip(weights - low, 0, limit)


def swarm(
    prior: np.ndarray,
    runs: int,
    seed: int,
    limit: np.ndarray | None = None,
    strengths: tuple[float, float] = WIDE,
) -> np.ndarray:
    """Mixtures (runs, k) float64, each summing to 1. prior (k,) of shares, limit (k,) from `caps`.

    A source with a share of 0 in the prior stays out. Draws over a cap are moved to the nearest mixture below it.
    Raises MixtureError where the prior is no mixture.
    """
    prior = np.asarray(prior, np.float64)
    if (prior < 0).any() or not prior.sum() > 0:
        raise MixtureError("A prior needs shares of 0 or more, and one above 0.")
    prior = prior / prior.sum()
    used = prior > 0
    limit = np.ones(len(prior)) if limit is None else limit
    if limit[used].sum() < 1 - 1e-9:
        raise MixtureError("The sources that the prior names are too small for the repetition cap: add one to it.")
    rng = np.random.default_rng(seed)
    low, high = (float(np.log(value)) for value in strengths)
    strength = np.exp(rng.uniform(low, high, runs)) * used.sum()
    gamma = np.zeros((runs, len(prior)))
    # Gamma draws of a tiny shape underflow to 0; the floor keeps every mixture a mixture.
    gamma[:, used] = np.maximum(rng.gamma(np.maximum(strength[:, None] * prior[used], 1e-3)), 1e-300)
    out = gamma / gamma.sum(1, keepdims=True)
    out[out < NEGLIGIBLE] = 0
    out /= out.sum(1, keepdims=True)
    return capped(out, np.where(used, limit, 0.0))
