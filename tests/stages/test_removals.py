"""Counts of what each rule removes."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from gristmill.stages.removals import Removal, Removals, tally


def test_three_documents_by_hand() -> None:
    """Of three documents with 10, 20 and 40 characters, the first two are short, the second also has symbols."""
    fails = {
        ("quality", "short"): np.array([True, True, False]),
        ("lines", "symbols"): np.array([False, True, False]),
    }
    found = tally(fails, np.array([10, 20, 40]), ["en", "en", None])
    assert found.rules["quality"]["short"] == {
        "en": Removal(documents=2, chars=30, only_documents=1, only_chars=10),
    }
    assert found.rules["lines"]["symbols"] == {"en": Removal(documents=1, chars=20)}
    assert found.came_in == {
        "": Removal(documents=1, chars=40, only_documents=1, only_chars=40),
        "en": Removal(documents=2, chars=30),
    }


@given(st.lists(st.tuples(st.booleans(), st.booleans(), st.integers(0, 99), st.sampled_from(["en", "de", None]))))
def test_batches_add_up(rows: list[tuple[bool, bool, int, str | None]]) -> None:
    def count(part: list[tuple[bool, bool, int, str | None]]) -> Removals:
        columns = [np.array([row[i] for row in part], bool) for i in (0, 1)]
        fails = {("a", "x"): columns[0], ("b", "y"): columns[1]}
        return tally(fails, np.array([row[2] for row in part], np.int64), [row[3] for row in part])

    half = len(rows) // 2
    both = count(rows[:half]).merge(count(rows[half:]))
    assert both == count(rows)
    once = sum(a != b for a, b, _, _ in rows)
    assert sum(r.only_documents for of in both.rules.values() for by in of.values() for r in by.values()) == once
