"""Conditions on measures: what holds, what a missing value does, what is refused."""

from __future__ import annotations

import math

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gristmill.mixtures.where import Where

TABLE = pa.table(
    {
        "q.score": [0.1, 0.5, 0.9, None, math.nan],
        "language": ["en", "de", "fr", "en", None],
        "n": pa.array([1, 2, 3, 4, 5], pa.int64()),
        "flag": [True, False, None, True, False],
    }
)


@pytest.mark.parametrize(
    ("text", "rows"),
    [
        ("q.score >= 0.5", [1, 2]),
        ("0.1 < q.score <= 0.9", [1, 2]),
        ("q.score != 0.5", [0, 2]),  # a value that is missing is not different: it is not known
        ("not q.score < 0.5", [1, 2, 3, 4]),
        ("language == 'en'", [0, 3]),
        ("language in ['en', 'fr'] and n > 1", [2, 3]),
        ("language not in ('en', 'fr')", [1]),
        ("n == 1 or (n >= 4 and flag)", [0, 3]),
        ("n > -1 and 3 > n", [0, 1]),
        ("n < q.score", []),
        ("flag", [0, 3]),
        ("not flag and n < 3", [1]),
    ],
)
def test_worked_examples(text: str, rows: list[int]) -> None:
    assert np.flatnonzero(Where.parse(text).holds(TABLE)).tolist() == rows


def test_columns_and_one_form() -> None:
    where = Where.parse(" (0.3<=a.b.score<.7)   and language in ('en',) or not a.b.score==1 ")
    assert where.columns == ("a.b.score", "language")
    assert where.text == "0.3 <= a.b.score < 0.7 and language in ('en',) or not a.b.score == 1"
    assert Where.parse(where.text).text == where.text


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("q.score >=", "is not a condition"),
        ("__import__('os').system('x') == 1", "neither a column, a number nor a text"),
        ("(lambda: 1)() < n", "neither a column"),
        ("n < [x for x in y]", "neither a column"),
        ("n", None),
        ("n + 1 > 2", "`n \\+ 1` is neither a column"),
        ("n is 1", "compares in a way"),
        ("1 < 2", "asks for no column"),
        ("language in 'en'", "is not a list of values"),
        ("language in [n]", "is not a list of values"),
        ("n[0] > 1", "neither a column"),
        ("n if flag else n", "is not a condition"),
        ("f'{n}' == 'x'", "neither a column"),
        ("(" * 300 + "n > 1" + ")" * 300, "is not a condition|at most"),
        ("n > 1" + " " * 1000, "at most 1,000 characters"),
        ("", "is not a condition"),
    ],
)
def test_everything_else_is_refused(text: str, message: str | None) -> None:
    if message is None:
        assert Where.parse(text).columns == ("n",)
        return
    with pytest.raises(ValueError, match=message):
        Where.parse(text)


@pytest.mark.parametrize("text", ["language > 3", "q.score == 'x'", "language in [1]", "language"])
def test_values_of_two_kinds_cannot_be_compared(text: str) -> None:
    with pytest.raises(ValueError, match="cannot be decided"):
        Where.parse(text).holds(TABLE)


@given(st.lists(st.floats(0, 1) | st.none() | st.just(math.nan), max_size=30), st.floats(0, 1), st.floats(0, 1))
def test_buckets_are_what_python_says(values: list[float | None], a: float, b: float) -> None:
    low, high = sorted((a, b))
    table = pa.table({"x": pa.array(values, pa.float64())})
    known = [v is not None and not math.isnan(v) for v in values]
    buckets = [f"x < {low!r}", f"{low!r} <= x < {high!r}", f"x >= {high!r}"]
    found = [Where.parse(text).holds(table) for text in buckets]
    assert sum(mask.astype(int) for mask in found).tolist() == [int(k) for k in known]
    assert found[1].tolist() == [k and low <= v < high for k, v in zip(known, values, strict=True)]
