"""The report's pictures and words."""

from __future__ import annotations

import pytest

from gristmill.pipelines.report import charts
from gristmill.pipelines.report.write import duration, percent, size


@pytest.mark.parametrize(
    ("value", "text"),
    [(None, "–"), (0, "0"), (1234567, "1,234,567"), (0.25, "0.25"), (1234.5678, "1,235"), (1e-9, "1e-09"), (3.0, "3")],
)
def test_numbers(value, text):
    assert charts.number(value) == text


def test_shares_sizes_and_times():
    assert [percent(x) for x in (0.0, 0.0001, 0.5, 0.9999, 1.0)] == [
        "0.0 %",
        "< 0.1 %",
        "50.0 %",
        "> 99.9 %",
        "100.0 %",
    ]
    assert [size(x) for x in (0, 999, 1500, 2_500_000, 3.2e12)] == ["0 B", "999 B", "1.5 kB", "2.5 MB", "3.2 TB"]
    assert [duration(x) for x in (0.25, 12.34, 75, 7260)] == ["250 ms", "12.3 s", "1 min 15 s", "2 h 1 min"]


def test_scales():
    linear = charts.Scale(0, 10, 100, 200)
    assert [linear(0), linear(5), linear(10)] == [100, 150, 200]
    assert linear.ticks() == [0, 2, 4, 6, 8, 10]
    log = charts.Scale(1, 1000, 0, 300, log=True)
    assert [log(1), log(10), log(1000)] == [0, 100, 300]
    assert log.ticks() == [1, 10, 100, 1000]
    assert charts.value_scale([1.0, 10.0, 100.0]).log
    assert not charts.value_scale([0.0, 1.0, 2.0]).log
    assert not charts.value_scale([1.0, 2.0, 3.0]).log


def test_curves_take_values_that_are_no_numbers():
    points = {"a": [(1.0, float("nan")), (2.0, 3.0), (3.0, float("inf"))], "b": []}
    assert "NaN" not in (svg := str(charts.curves("loss", points, {"a": 0, "b": 1})))
    assert "inf" not in svg
    assert "No finite values" in charts.curves("loss", {"a": [(1.0, float("nan"))]}, {})
    assert "No finite values" in charts.intervals("score", [charts.Interval("a", float("nan"))], {})


def test_thin_keeps_means():
    line = [(float(i), float(i)) for i in range(1000)]
    thinned = charts.thin(line, 10)
    assert len(thinned) == 10
    assert thinned[0] == (49.5, 49.5)
    assert charts.thin(line[:5], 10) == line[:5]
