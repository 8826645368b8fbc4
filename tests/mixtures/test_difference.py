"""Two plans side by side."""

from __future__ import annotations

from gristmill.mixtures.difference import difference_table, differences, shared_windows
from gristmill.mixtures.mixture import Mixture

SIZES = {"a": 10_001, "b": 3_001, "c": 3_001}


def test_worked_example() -> None:
    one = Mixture(name="one", sources={"a": 0.75, "b": 0.25}).plan(SIZES, 10, 4000)
    two = Mixture(name="two", sources={"a": 0.5, "c": 0.5}).plan(SIZES, 10, 2000)
    pairs = {pair.source: pair for pair in differences(one, two)}
    assert list(pairs) == ["a", "b", "c"]
    assert pairs["a"].weight_change == -0.25
    assert (pairs["b"].a.windows if pairs["b"].a else None, pairs["b"].b) == (100, None)
    assert (pairs["c"].a, pairs["c"].weight_change) == (None, 0.5)
    assert difference_table(one, two).splitlines()[2:] == [
        "the same up to 0 tokens; of each pair of columns the first is a's",
        "",
        "source  tokens  tokens   share   share   change  epochs  epochs",
        "a        3,000   1,000  75.00%  50.00%  -25.00%    0.30    0.10",
        "b        1,000       -  25.00%       -  -25.00%    0.33       -",
        "c            -   1,000       -  50.00%  +50.00%       -    0.33",
    ]


def test_runs_that_fork_are_the_same_up_to_the_fork() -> None:
    trunk = {"name": "trunk", "tokens": 3000}
    forks = [
        Mixture(
            name=name,
            sources={"a": 0.7, "b": 0.2, "c": 0.1},
            phases=[trunk, {"name": "anneal", "tokens": 1000, "weights": {name: 1}, "ramp": "linear"}],
        ).plan(SIZES, 10)
        for name in ("b", "c")
    ]
    assert shared_windows(*forks) == 300
    assert [forks[0].locate(i) for i in range(300)] == [forks[1].locate(i) for i in range(300)]
    longer = Mixture(name="longer", sources={"a": 0.7, "b": 0.2, "c": 0.1}).plan(SIZES, 10, 5000)
    assert shared_windows(forks[0], longer) == 300
    other_seed = Mixture(name="other", sources={"a": 0.7, "b": 0.2, "c": 0.1}).plan(SIZES, 10, 5000, seed=1)
    assert shared_windows(longer, other_seed) == 0
