"""Repetition-matched runs: each source is cut to budget / target, by document, the same way for all."""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gristmill.mixtures.consumption import Consumption
from gristmill.mixtures.mixture import Mixture
from gristmill.mixtures.plan import MixtureError
from gristmill.mixtures.subsample import document_keys, thinned

SIZES = {"docs": [[20, 30] * 40, [50] * 40], "code": [[40] * 50], "readmes": [[25] * 60]}
WEIGHTS = {"docs": 0.5, "code": 0.3, "readmes": 0.2}


def test_a_worked_example() -> None:
    """Keys 5 1 9 3 put the documents in the order 1, 3, 0, 2, with 10, 50, 70 and 100 tokens in all."""
    keys, tokens = np.array([5, 1, 9, 3], np.uint64), np.array([20, 10, 30, 40])
    everything = np.ones(4, bool)
    assert thinned(keys, tokens, everything, Fraction(1, 2)).tolist() == [False, True, False, True]
    assert thinned(keys, tokens, everything, Fraction(7, 10)).tolist() == [True, True, False, True]
    assert thinned(keys, tokens, everything, Fraction(1, 1000)).tolist() == [False, True, False, False]  # one stays
    some = np.array([True, False, True, False])
    assert thinned(keys, tokens, some, Fraction(1, 2)).tolist() == [True, False, False, False]
    assert thinned(keys, tokens, ~everything, Fraction(1, 2)).tolist() == [False] * 4


@given(
    st.lists(st.tuples(st.integers(0, 5), st.integers(1, 90), st.booleans()), min_size=1, max_size=40),
    st.fractions(Fraction(1, 100), 1),
    st.fractions(Fraction(1, 100), 1),
)
def test_a_smaller_share_is_part_of_a_larger_one(rows: list[tuple[int, int, bool]], a: Fraction, b: Fraction) -> None:
    keys, tokens, chosen = (np.array(column) for column in zip(*rows, strict=True))
    small, large = (thinned(keys.astype(np.uint64), tokens, chosen, share) for share in sorted((a, b)))
    assert not (small & ~large).any()
    assert not (large & ~chosen).any()
    assert large.any() == chosen.any()
    if large.sum() > 1:
        assert tokens[large].sum() <= tokens[chosen].sum() * max(a, b)
        assert tokens[large].sum() + tokens[chosen].max() > tokens[chosen].sum() * max(a, b)


def test_keys_do_not_depend_on_the_shards(make_tokens: Callable[..., Any]) -> None:
    together = make_tokens({"code": [[40, 30, 20]]})
    keys = document_keys(together.sources["code"])
    assert len(set(keys.tolist())) == 3
    same = make_tokens({"code": [[40, 30, 20]], "docs": [[10, 10]]})
    assert document_keys(same.sources["code"]).tolist() == keys.tolist()


def test_epochs_are_those_of_the_run_that_it_stands_for(make_tokens: Callable[..., Any]) -> None:
    tokens = make_tokens(SIZES)
    mixture = Mixture(name="m", sources=WEIGHTS, max_epochs=20)
    large = {row.source: row.epochs_after for row in mixture.plan(tokens, 8, 8_000).totals()}
    small = mixture.plan(tokens, 8, 1_600, target_tokens=8_000)
    free = {row.source: row.epochs_after for row in mixture.plan(tokens, 8, 1_600).totals()}
    for row in small.totals():
        assert row.epochs_after == pytest.approx(large[row.source], rel=0.12)  # a document more or less
        assert free[row.source] == pytest.approx(large[row.source] / 5, rel=0.05)
    assert any("tokens, so that it is repeated as often" in note for note in small.notes)


def test_mixtures_and_seeds_use_the_same_documents(make_tokens: Callable[..., Any]) -> None:
    tokens = make_tokens(SIZES)

    def seen(weights: dict[str, float], seed: int, budget: int = 1_600) -> dict[str, set[str]]:
        plan = Mixture(name="m", sources=weights, max_epochs=20).plan(tokens, 8, budget, seed, target_tokens=8_000)
        held: dict[str, set[str]] = {}
        for position in range(plan.windows):
            source, _, window = plan.locate(position)
            for begin, length in plan.pieces(source, window):
                place = {plan.tokens.sources[source].document_at(at)[0] for at in range(begin, begin + length)}
                held.setdefault(source, set()).update(place)
        return held

    first = seen(WEIGHTS, 1)
    assert seen(WEIGHTS, 2) == first
    assert seen({"docs": 1, "code": 1, "readmes": 1}, 1) == first
    larger = seen(WEIGHTS, 1, 3_200)
    assert all(first[name] < larger[name] for name in first)


def test_parts_of_sources_are_cut_too(make_tokens: Callable[..., Any]) -> None:
    tokens = make_tokens(SIZES)
    mixture = Mixture(name="m", sources={"other": {"source": "docs", "weight": 1}, "code": 1})
    plan = mixture.plan(tokens, 8, 1_000, target_tokens=4_000)
    assert plan.sizes["other"].tokens == pytest.approx(1_000, abs=50)
    assert plan.tokens.sources["other"].name == "other"
    assert plan.hash != mixture.plan(tokens, 8, 1_000).hash


def test_what_cannot_be_is_refused(make_tokens: Callable[..., Any]) -> None:
    tokens = make_tokens(SIZES)
    mixture = Mixture(name="m", sources=WEIGHTS)
    with pytest.raises(MixtureError, match="target_tokens 100 is of a larger run than this one"):
        mixture.plan(tokens, 8, 1_000, target_tokens=100)
    with pytest.raises(MixtureError, match="budget_tokens is not given"):
        mixture.plan(tokens, 8, target_tokens=100)
    with pytest.raises(MixtureError, match="needs token shards, not sizes alone"):
        mixture.plan({"docs": 1000, "code": 1000, "readmes": 1000}, 8, 100, target_tokens=200)
    books = Consumption.after(mixture.plan(tokens, 8, 1_000), 3)
    with pytest.raises(MixtureError, match="cannot be given to a run that continues another"):
        mixture.plan(tokens, 8, 1_000, continue_from=books, target_tokens=2_000)
