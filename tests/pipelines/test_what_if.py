"""What another limit would keep."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gristmill.pipelines.report.what_if import what_ifs
from gristmill.stages.documents import Measure, Rule, linear_edges
from gristmill.stages.ledger import Amount, Histogram, StageLedger


def sizes_of(values):
    """Characters of the documents: some number that differs."""
    return 1 + 7 * np.arange(len(values)) % 11


def books_of(values, other, rule, measure):
    """The ledger of a stage with `rule` on values and a second rule that drops where `other` is true."""
    fails = rule.fails(values)
    drop = fails | other
    histogram = Histogram.empty(measure)
    chars = sizes_of(values)
    histogram.add(values[~drop], kept=True, chars=chars[~drop])
    histogram.add(values[drop], kept=False, chars=chars[drop])
    alone = fails & ~other
    return StageLedger(
        stage="s",
        read=Amount(documents=len(values)),
        kept=Amount(documents=int((~drop).sum()), chars=int(chars[~drop].sum())),
        dropped={"any": Amount(documents=int(drop.sum()), chars=int(chars[drop].sum()))},
        counters={
            f"rule.{rule.reason}": int(fails.sum()),
            f"only.{rule.reason}": int(alone.sum()),
            f"rule_chars.{rule.reason}": int(chars[fails].sum()),
            f"only_chars.{rule.reason}": int(chars[alone].sum()),
        },
        histograms={measure.column: histogram},
    )


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.tuples(st.floats(-2, 12) | st.sampled_from([0.0, 3.0, 5.0, 10.0, float("nan")]), st.booleans())),
    st.sampled_from([(4.5, None), (None, 6.2), (3.0, None), (None, 5.0), (2.5, 7.5), (-1.0, 11.0)]),
)
def test_what_if_bounds_hold_the_truth(rows, bounds):
    """Against running the rule again with every limit. An upper limit is answered for the values below it."""
    values, other = np.array([v for v, _ in rows], dtype=float), np.array([o for _, o in rows], dtype=bool)
    rule = Rule("r", "s.x", at_least=bounds[0], at_most=bounds[1])
    measure = Measure("s.x", "", linear_edges(0, 10, 10))
    book = books_of(values, other, rule, measure)
    for answer in what_ifs(rule, book.histograms["s.x"], book):
        for limit, low, high in zip(answer.limits, answer.low, answer.high, strict=True):
            least = limit if answer.side == "at_least" else bounds[0]
            most = limit if answer.side == "at_most" else bounds[1]
            passes = ~np.isnan(values) & ~other
            if least is not None:
                passes &= values >= least
            if most is not None:
                exact = answer.side != "at_most" or limit in (answer.now, measure.edges[-1])
                passes &= (values <= most) if exact else (values < most)
            if answer.side == "at_most" and limit > answer.now:
                passes |= ~other & ~rule.fails(values)  # those on the limit in force stay in any case
            truth = int(passes.sum())
            assert low <= truth <= high, (answer.side, limit)
            chars = int(sizes_of(values)[passes].sum())
            at = answer.limits.index(limit)
            assert answer.low_chars[at] <= chars <= answer.high_chars[at], (answer.side, limit)
            tighter = limit > answer.now if answer.side == "at_least" else limit < answer.now
            if tighter:
                assert low == high


@pytest.mark.parametrize(
    ("side", "now", "expected"),
    [
        ("at_least", 3, {0: 0, 2: 2, 2.5: 3, 3: 3, 5: 5, 8: 8}),  # at least 2.5 words are at least 3
        ("at_most", 6, {0: -1, 2: 1, 2.5: 2, 5: 4, 6: 6, 8: 7, 10: 10}),  # below 5 is at most 4; 10 is in the last bin
    ],
)
def test_whole_numbers_to_write_into_a_recipe(side, now, expected):
    rule = Rule("r", "s.x", **{side: now})
    book = books_of(np.arange(11.0), np.zeros(11, bool), rule, Measure("s.x", "", (0.0, 2.0, 2.5, 5.0, 8.0, 10.0)))
    (answer,) = what_ifs(rule, book.histograms["s.x"], book)
    edges = book.histograms["s.x"].edges
    assert dict(zip(answer.limits, answer.values(edges, integer=True), strict=True)) == expected
    for value, low, high in zip(answer.values(edges, integer=True), answer.low, answer.high, strict=True):
        truth = int((~Rule("r", "s.x", **{side: value}).fails(np.arange(11.0))).sum())
        assert low == high == truth, value


def test_what_if_by_hand():
    """Ten documents of 0.5, 1.5, ... 9.5 words; at least 3: three are dropped, one of them for another rule too."""
    values, other = np.arange(10) + 0.5, np.zeros(10, dtype=bool)
    other[1] = True
    rule = Rule("r", "s.x", at_least=3)
    book = books_of(values, other, rule, Measure("s.x", "", linear_edges(0, 10, 10)))
    (answer,) = what_ifs(rule, book.histograms["s.x"], book)
    by_limit = {limit: (low, high) for limit, low, high in zip(answer.limits, answer.low, answer.high, strict=True)}
    assert by_limit[3] == (7, 7)
    assert by_limit[5] == (5, 5)
    assert by_limit[2] == (7, 8)  # 2.5 comes back, unless it is the one that the other rule drops
    assert by_limit[0] == (9, 9)  # 0.5 and 2.5 come back
    assert by_limit[9] == (1, 1)
    chars = {limit: found for limit, *found in zip(answer.limits, answer.low_chars, answer.high_chars, strict=True)}
    assert list(sizes_of(values)) == [1, 8, 4, 11, 7, 3, 10, 6, 2, 9]
    assert chars[3] == [48, 48]
    assert chars[5] == [30, 30]
    assert chars[2] == [48, 52]  # 2.5 has 4 characters
    assert chars[0] == [53, 53]


def test_ledgers_of_earlier_versions_know_no_characters():
    rule = Rule("r", "s.x", at_least=3)
    book = books_of(np.arange(9.0), np.zeros(9, bool), rule, Measure("s.x", "", linear_edges(0, 10, 10)))
    known = book.histograms["s.x"]
    old = known.model_copy(update={"kept_chars": None, "dropped_chars": None})
    (answer,) = what_ifs(rule, old, book)
    assert answer.low_chars == answer.high_chars == []
    assert answer.low[0] == 9
    assert known.merge(old).kept_chars is None
    empty = Histogram.empty(Measure("s.x", "", linear_edges(0, 10, 10)))
    assert known.merge(empty).kept_chars == empty.merge(known).kept_chars == known.kept_chars
