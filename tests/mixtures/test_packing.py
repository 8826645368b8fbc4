"""Best-fit packing: every target once, documents whole where they fit, the same as the rule written plainly."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gristmill.mixtures.mixture import Mixture
from gristmill.mixtures.packing import best_fit
from gristmill.mixtures.plan import MixtureError


def pack(lengths: list[int], seq_len: int, group: int = 1 << 16) -> Any:
    starts = np.cumsum([0, *lengths[:-1]]).astype(np.int64)
    return best_fit(starts, sum(lengths), seq_len, group)


def plain_best_fit(pieces: list[tuple[int, int]], room: int) -> list[list[tuple[int, int]]]:
    """The rule in so many words; of windows with equal room the one that got it last."""
    windows: list[list[tuple[int, int]]] = []
    free: list[tuple[int, int]] = []  # (room left, when)
    for clock, (start, length) in enumerate(sorted(pieces, key=lambda piece: -piece[1])):
        fitting = [(left, -when, w) for w, (left, when) in enumerate(free) if left >= length]
        if fitting:
            w = min(fitting)[2]
        else:
            w = len(windows)
            windows.append([])
            free.append((room, 0))
        windows[w].append((start, length))
        free[w] = (free[w][0] - length, clock)
    return windows


def test_worked_example() -> None:
    # Windows of 10. Documents of 7, 4, 3, 6, 23 at 0, 7, 11, 14, 20. The last gives 10 at 20, 10 at 29 and 5 at 38.
    packing = pack([7, 4, 3, 6, 23], 9)
    assert [packing.pieces(w) for w in range(packing.windows)] == [
        [(20, 10)],
        [(29, 10)],
        [(0, 7), (11, 3)],
        [(14, 6), (7, 4)],
        [(38, 5)],
    ]
    assert packing.padding_tokens == 5
    assert packing.padding_share == 0.1


lengths_of_documents = st.lists(st.integers(1, 60), min_size=1, max_size=120)


@given(lengths_of_documents, st.integers(1, 40))
@settings(max_examples=150, deadline=None)
def test_the_kernel_is_the_rule_and_every_target_comes_once(lengths: list[int], seq_len: int) -> None:
    packing = pack(lengths, seq_len)
    windows = [packing.pieces(w) for w in range(packing.windows)]
    pieces, targets, at = [], [], 0
    for length in lengths:
        targets += range(at + 1, at + length)
        begin = at
        while at + length - begin > seq_len + 1:
            pieces.append((begin, seq_len + 1))
            begin += seq_len
        pieces.append((begin, at + length - begin))
        at += length
    assert windows == plain_best_fit(pieces, seq_len + 1)
    assert sorted(t for window in windows for start, n in window for t in range(start + 1, start + n)) == targets
    assert all(sum(n for _, n in window) <= seq_len + 1 for window in windows)


@given(lengths_of_documents, st.integers(1, 40), st.integers(1, 50))
@settings(max_examples=60, deadline=None)
def test_groups_are_packed_by_themselves(lengths: list[int], seq_len: int, group: int) -> None:
    packing = pack(lengths, seq_len, group)
    pieces = sorted(p for w in range(packing.windows) for p in packing.pieces(w))
    whole = pack(lengths, seq_len)
    assert pieces == sorted(p for w in range(whole.windows) for p in whole.pieces(w))


def test_little_is_padding_for_documents_of_ordinary_lengths() -> None:
    lengths = np.maximum(1, np.random.default_rng(0).lognormal(6, 1, 20_000)).astype(int).tolist()
    assert pack(lengths, 2048).padding_share < 0.002


def test_a_wide_window_uses_all_levels_of_the_index() -> None:
    # Windows of 13,000: 8,001 and 5,000 miss by one; the small ones go where 712 are left, not 4,000 or more.
    packing = pack([9000, 8001, 5000, 1, 4096, 8192, 64, 63], 12_999)
    lengths = [[n for _, n in packing.pieces(w)] for w in range(packing.windows)]
    assert lengths == [[9000], [8192, 4096, 64, 63, 1], [8001], [5000]]


def test_a_plan_with_best_fit_loads_whole_documents(tokens: Any) -> None:
    # docs: 300, 13, 87, 100 | 250, 250; readmes: 3, 200; windows of 129.
    mixture = Mixture(name="m", sources={"docs": {"epochs": 1}, "readmes": {"epochs": 1}}, packing="best_fit")
    plan = mixture.plan(tokens, 128, seed=2)
    assert "best_fit" in plan.table()
    seen: dict[str, list[int]] = {"docs": [], "readmes": []}
    for batch in plan.loader(batch_windows=3):
        for i in range(len(batch.tokens)):
            source = plan.sources[batch.source[i]]
            pieces = plan.pieces(source, int(batch.window[i]))
            documents, at = batch.documents[i], 0
            for number, (start, length) in enumerate(pieces):
                expected = plan.tokens.sources[source].read(start, length)
                assert (batch.tokens[i, at : at + length] == expected).all()
                assert (documents[at : at + length] == number).all()
                seen[source] += range(start + 1, start + length)
                at += length
            assert batch.padding[i] == 129 - at
            assert (batch.tokens[i, at:] == plan.tokens.eos_id).all()
            # Padding is a document of its own at every place: no target lies in it.
            assert documents[at:].tolist() == list(range(len(pieces), len(pieces) + 129 - at))
    assert sorted(seen["docs"]) == [t for t in range(1000) if t not in (0, 300, 313, 400, 500, 750)]
    assert sorted(seen["readmes"]) == [t for t in range(203) if t not in (0, 3)]
    other = Mixture(name="m", sources={"docs": {"epochs": 1}, "readmes": {"epochs": 1}}).plan(tokens, 128, seed=2)
    assert other.hash != plan.hash


def test_best_fit_needs_the_documents() -> None:
    with pytest.raises(MixtureError, match="packing best_fit needs the lengths of the documents"):
        Mixture(name="m", sources={"a": 1}, packing="best_fit").plan({"a": 1000}, 10, 100)
