"""Radix sort, union-find, verified edges and election against slow Python."""

from __future__ import annotations

from collections import defaultdict
from itertools import pairwise

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gristmill.stages.kernels import cluster


def components(count: int, edges: list[tuple[int, int]]) -> list[int]:
    """The smallest node of each node's component."""
    label = list(range(count))
    changed = True
    while changed:
        changed = False
        for a, b in edges:
            low = min(label[a], label[b])
            if label[a] != low or label[b] != low:
                label[a] = label[b] = low
                changed = True
    return label


def sort(keys: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    rows = np.arange(len(keys), dtype=np.uint32)
    return cluster.radix_sort(keys.copy(), rows, np.empty_like(keys), np.empty_like(rows))


@settings(max_examples=100, deadline=None)
@given(st.lists(st.one_of(st.integers(0, 2**64 - 1), st.integers(0, 5), st.integers(2**63, 2**63 + 9)), max_size=60))
def test_radix_sort_is_a_stable_sort(values: list[int]) -> None:
    keys = np.array(values, np.uint64)
    by_key, rows = sort(keys)
    order = np.argsort(keys, kind="stable")
    assert rows.tolist() == order.tolist()
    assert by_key.tolist() == keys[order].tolist()


@pytest.mark.parametrize("distinct", [1, 2, 1_000, 10**9])
@pytest.mark.parametrize("bits", [3, 11, 22, 25, 33, 40, 64])
def test_radix_sort_of_many(distinct: int, bits: int) -> None:
    """Keys that differ in few bits, in the lowest bits, with many repeats, in several buckets."""
    rng = np.random.default_rng(bits)
    pool = rng.integers(0, 2**bits, min(distinct, 50_000), dtype=np.uint64) | np.uint64(5 << 40)
    keys = pool[rng.integers(0, len(pool), 50_000)]
    by_key, rows = sort(keys)
    order = np.argsort(keys, kind="stable")
    assert np.array_equal(rows, order)
    assert np.array_equal(by_key, keys[order])


def test_keys_that_share_their_upper_bits_are_not_mixed() -> None:
    """5, 6, 5 agree in all bits that the passes look at: without the last step the fives would stay apart."""
    values = np.array([5, 6, 5] * 20 + [2**63], np.uint64)
    keys, rows = sort(values)
    parent = np.arange(61, dtype=np.uint32)
    assert cluster.union_runs(keys, rows, parent) == 39 + 19
    cluster.flatten(parent)
    assert parent.tolist() == [0, 1, 0] * 20 + [60]


@settings(max_examples=100, deadline=None)
@given(st.lists(st.lists(st.integers(0, 12), min_size=30, max_size=30), min_size=1, max_size=4))
def test_clusters_are_the_components(bands: list[list[int]]) -> None:
    parent = np.arange(30, dtype=np.uint32)
    edges = []
    for values in bands:
        cluster.union_runs(*sort(np.array(values, np.uint64)), parent)
        edges += [(i, j) for i in range(30) for j in range(i) if values[i] == values[j] and values[i] < 9]
        edges += [(i, j) for i in range(30) for j in range(i) if values[i] == values[j]]
    cluster.flatten(parent)
    assert parent.tolist() == components(30, edges)


def test_random_graph_of_a_hundred_thousand() -> None:
    rng = np.random.default_rng(4)
    n = 100_000
    parent = np.arange(n, dtype=np.uint32)
    groups: dict[tuple[int, int], list[int]] = defaultdict(list)
    for band in range(3):
        values = rng.integers(0, 300_000, n).astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)
        cluster.union_runs(*sort(values), parent)
        for i, value in enumerate(values.tolist()):
            groups[band, value].append(i)
    cluster.flatten(parent)
    slow = list(range(n))

    def find(x: int) -> int:
        while slow[x] != x:
            slow[x] = slow[slow[x]]
            x = slow[x]
        return x

    for members in groups.values():
        for a, b in pairwise(members):
            ra, rb = sorted((find(a), find(b)))
            slow[rb] = ra
    assert parent.tolist() == [find(i) for i in range(n)]


def lists(sets: list[list[int]]) -> pa.ChunkedArray:
    """Sets as a column of two chunks, the second a slice with an offset."""
    half = len(sets) // 2
    kind = pa.list_(pa.uint32())
    return pa.chunked_array([pa.array(sets[:half], kind), pa.array([[7], *sets[half:]], kind)[1:]])


@settings(max_examples=100, deadline=None)
@given(st.lists(st.sets(st.integers(0, 30), min_size=1, max_size=12), min_size=2, max_size=14), st.integers(1, 14))
def test_set_similarity_is_jaccard(sets: list[set[int]], cap: int) -> None:
    """Exact for whole sets; of sets cut down to `cap`, that of the elements up to the last one that both kept."""
    column = lists([sorted(s)[:cap] for s in sets])
    at, counts = cluster.addresses(column)
    for i, a in enumerate(sets):
        for j, b in enumerate(sets):
            limit = min([sorted(s)[cap - 1] for s in (a, b) if len(s) >= cap], default=99)
            x, y = {v for v in a if v <= limit}, {v for v in b if v <= limit}
            got = cluster.set_similarity(at[i], int(counts[i]), at[j], int(counts[j]), cap)
            assert got == pytest.approx(len(x & y) / len(x | y))


def test_signature_similarity_of_a_sliced_column() -> None:
    values = pa.FixedSizeListArray.from_arrays(pa.array([9, 9, 9, 9, 1, 2, 3, 4, 1, 2, 5, 4], pa.uint32()), 4)
    column = pa.chunked_array([values[1:], values[:1]])
    at, counts = cluster.addresses(column)
    assert counts.tolist() == [4, 4, 4]
    assert cluster.signature_similarity(at[0], at[1], 4) == 0.75
    assert cluster.signature_similarity(at[0], at[2], 4) == 0.0


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_no_join_without_a_verified_edge(data: st.DataObject) -> None:
    n = data.draw(st.integers(2, 24))
    sets = [sorted(data.draw(st.sets(st.integers(0, 9), min_size=1, max_size=6))) for _ in range(n)]
    values = np.array(data.draw(st.lists(st.integers(0, 2), min_size=n, max_size=n)), np.uint64)
    column = lists(sets)
    at, counts = cluster.addresses(column)
    parent = np.arange(n, dtype=np.uint32)
    joined, failed, skipped = cluster.union_verified(*sort(values), parent, at, counts, 100, 0.5)
    cluster.flatten(parent)
    edges = [
        (i, j)
        for i in range(n)
        for j in range(i)
        if values[i] == values[j] and len({*sets[i]} & {*sets[j]}) / len({*sets[i]} | {*sets[j]}) >= 0.5
    ]
    assert parent.tolist() == components(n, edges)
    assert joined == n - len(set(parent.tolist()))
    assert skipped == 0
    assert failed <= n * n


def test_a_long_run_is_bounded_and_does_not_depend_on_order() -> None:
    """3,000 documents of one key, in 1,500 pairs of equal sets: only equal ones join, whatever their order."""
    sets = [[i, i + 5_000] for i in range(1_500)] * 2
    labels = []
    for order in (np.arange(3_000), np.random.default_rng(0).permutation(3_000)):
        column = lists([sets[i] for i in order])
        at, counts = cluster.addresses(column)
        parent = np.arange(3_000, dtype=np.uint32)
        joined, failed, skipped = cluster.union_verified(
            *sort(np.zeros(3_000, np.uint64)), parent, at, counts, 100, 0.9
        )
        cluster.flatten(parent)
        assert joined == 1_500
        assert failed <= 3_000 * cluster.PAIRS
        assert skipped > 0
        groups = defaultdict(set)
        for i, root in zip(order.tolist(), parent.tolist(), strict=True):
            groups[root].add(i)
        labels.append(sorted(map(sorted, groups.values())))
    assert labels[0] == labels[1]


def test_election() -> None:
    """Clusters {0, 2, 3} and {1, 4}: the smallest rank, then the smallest bytes."""
    members = np.arange(5, dtype=np.uint32)
    labels = np.array([0, 1, 0, 0, 1], np.uint32)
    ranks = np.array([2.0, 1, 1, 1, 1])
    ties = [b"a", b"xy", b"c", b"b", b"x"]
    best = np.full(5, 0xFFFFFFFF, np.uint32)
    offsets = np.cumsum([0, *map(len, ties)]).astype(np.int64)
    cluster.elect(members, labels, ranks, offsets, np.frombuffer(b"".join(ties), np.uint8), best)
    assert best[:2].tolist() == [3, 4]


def test_key_ranges_select_each_row_once() -> None:
    keys = np.array([0, 5, 2**63, 2**64 - 1, 7], np.uint64)
    alive = np.array([True, True, True, True, False])
    none = np.zeros(0, np.uint64)
    out, rows = np.zeros(5, np.uint64), np.zeros(5, np.uint32)
    middle = 2**63
    found = cluster.select(keys, alive, none, np.uint64(0), np.uint64(middle - 1), out, rows, 0, 100)
    assert rows[:found].tolist() == [100, 101]
    found = cluster.select(keys, alive, none, np.uint64(middle), np.uint64(2**64 - 1), out, rows, found, 100)
    assert rows[:found].tolist() == [100, 101, 102, 103]
    assert out[:found].tolist() == [0, 5, 2**63, 2**64 - 1]
