"""Equal keys -> clusters: radix sort, union-find over arrays, election of the document that stays.

A row is the number of a document in this process, uint32. Rows are never stored, and no result depends on them: the
sets that union-find makes are those of the graph, and who stays is decided by content (`elect`).
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
from llvmlite import ir
from numba import int64, njit, types, uint32, uint64
from numba.extending import intrinsic

from gristmill.stages.kernels.buffers import load8, mix64

MAX_ROWS = 2**32 - 2
PAIRS = 256  # documents of one run that each document is compared with, at most
_DIGIT_BITS = 11
_BUCKET = 4_096  # keys: with their rows and copies they fit into a second-level cache
_FEW = 24  # keys that insertion sorts sooner than two passes


def _load_at(bits: int) -> Any:
    result: Any = {32: types.uint32, 64: types.uint64}[bits]

    @intrinsic
    def load(typing_context: Any, address: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            pointer = builder.inttoptr(arguments[0], ir.IntType(bits).as_pointer())
            return builder.load(pointer, align=1)

        return result(types.int64), generate

    return load


load32_at = _load_at(32)  # load32_at(address): 4 bytes of memory that the caller keeps alive


def addresses(column: pa.ChunkedArray) -> tuple[np.ndarray, np.ndarray]:
    """A fixed_size_list<uint32> or list<uint32> column -> of each row (address (n,) int64, values (n,) uint32).

    The values stay where they are, in a memory map for example: verifying touches only those of candidates. The
    caller keeps the column alive as long as it uses the addresses.
    """
    at, counts = np.empty(len(column), np.int64), np.empty(len(column), np.uint32)
    row = 0
    for chunk in column.chunks:
        if not len(chunk):
            continue
        here = slice(row, row + len(chunk))
        if pa.types.is_fixed_size_list(chunk.type):
            size = chunk.type.list_size
            starts = (np.arange(len(chunk), dtype=np.int64) + chunk.offset) * size
            counts[here] = size
        else:
            offsets = np.frombuffer(chunk.buffers()[1], np.int32)[chunk.offset : chunk.offset + len(chunk) + 1]
            starts = offsets[:-1].astype(np.int64)
            counts[here] = np.diff(offsets)
        values = chunk.values
        at[here] = values.buffers()[1].address + 4 * (starts + values.offset)
        row += len(chunk)
    return at, counts


@njit(nogil=True, cache=True)
def select(keys, alive, salts, low, high, out, rows, filled, first_row):  # type: ignore[no-untyped-def]
    """Appends the keys of one shard that lie in [low, high] -> how many `out` and `rows` hold now.

    keys (n,) uint64; alive (n,) bool; salts (n,) uint64, or (0,): mixed into the key, so that documents of different
    scopes do not meet. rows gets first_row + position.
    """
    for i in range(keys.shape[0]):
        if alive[i]:
            key = keys[i]
            if salts.shape[0]:
                key = mix64(key ^ salts[i])
            if low <= key <= high:
                out[filled] = key
                rows[filled] = uint32(first_row + i)
                filled += 1
    return filled


@njit(inline="always")
def _scatter(keys, rows, out_keys, out_rows, start, end, shift, mask, begin):  # type: ignore[no-untyped-def]
    """A stable pass over start:end by the digit above `shift`. begin (mask + 2,) int64 is left at the digits' ends."""
    begin[: mask + 2] = 0
    for i in range(start, end):
        begin[int64(keys[i] >> uint64(shift)) & mask] += 1
    total = start
    for d in range(mask + 1):
        count = begin[d]
        begin[d] = total
        total += count
    for i in range(start, end):
        d = int64(keys[i] >> uint64(shift)) & mask
        j = begin[d]
        begin[d] = j + 1
        out_keys[j] = keys[i]
        out_rows[j] = rows[i]


@njit(nogil=True, cache=True)
def radix_sort(keys, rows, spare_keys, spare_rows):  # type: ignore[no-untyped-def]
    """Sorts keys and rows by key; equal keys keep their order -> the sorted pair, in the spares.

    Made for hashes: one pass by the highest bits in which keys differ makes buckets that fit into a cache, two passes
    sort a bucket by the next 22 bits, insertion does the rest. Of n random keys that is about n / 2^11 pairs.
    """
    n = keys.shape[0]
    smallest = uint64(0xFFFFFFFFFFFFFFFF)
    largest = uint64(0)
    for i in range(n):
        smallest = min(smallest, keys[i])
        largest = max(largest, keys[i])
    high = 0  # keys differ below this bit only
    while high < 64 and (smallest ^ largest) >> uint64(high) != 0:
        high += 1
    top = 0
    while top < min(_DIGIT_BITS, high) and (n >> top) > _BUCKET:
        top += 1
    digit = (1 << _DIGIT_BITS) - 1
    bounds = np.empty((1 << top) + 1, np.int64)
    begin = np.empty(digit + 2, np.int64)
    _scatter(keys, rows, spare_keys, spare_rows, 0, n, high - top, (1 << top) - 1, bounds)
    start = int64(0)
    for bucket in range(1 << top):
        end = bounds[bucket]
        middle = high - top
        if end - start > _FEW:
            for k in range(2):
                low = max(0, middle - 2 * _DIGIT_BITS) + k * _DIGIT_BITS
                mask = min(digit, (1 << max(0, middle - low)) - 1)
                low = min(low, 63)
                if k == 0:
                    _scatter(spare_keys, spare_rows, keys, rows, start, end, low, mask, begin)
                else:
                    _scatter(keys, rows, spare_keys, spare_rows, start, end, low, mask, begin)
        for i in range(start + 1, end):
            key, row = spare_keys[i], spare_rows[i]
            j = i
            while j > start and spare_keys[j - 1] > key:
                spare_keys[j] = spare_keys[j - 1]
                spare_rows[j] = spare_rows[j - 1]
                j -= 1
            spare_keys[j] = key
            spare_rows[j] = row
        start = end
    return spare_keys, spare_rows


@njit(inline="always")
def _find(parent, row):  # type: ignore[no-untyped-def]
    while parent[row] != row:
        parent[row] = parent[parent[row]]
        row = parent[row]
    return row


@njit(inline="always")
def _union(parent, a, b):  # type: ignore[no-untyped-def]
    """Joins two sets; the smaller root stays a root. True where they were apart."""
    a = _find(parent, a)
    b = _find(parent, b)
    if a == b:
        return False
    if a < b:
        parent[b] = a
    else:
        parent[a] = b
    return True


@njit(nogil=True, cache=True)
def union_runs(keys, rows, parent):  # type: ignore[no-untyped-def]
    """Joins rows of equal keys; keys sorted -> how many joins had an effect."""
    joined = 0
    for i in range(1, keys.shape[0]):
        if keys[i] == keys[i - 1]:
            joined += int64(_union(parent, rows[i - 1], rows[i]))
    return joined


@njit(nogil=True, cache=True)
def signature_similarity(a, b, places):  # type: ignore[no-untyped-def]
    """Share of places in which two signatures agree: the estimate of their Jaccard similarity."""
    same = 0
    for i in range(places):
        if load32_at(a + 4 * i) == load32_at(b + 4 * i):
            same += 1
    return same / places


@njit(nogil=True, cache=True)
def set_similarity(a, count_a, b, count_b, cap):  # type: ignore[no-untyped-def]
    """Jaccard similarity of two sorted sets. Exact, but where a set was cut down to its `cap` smallest hashes.

    Then both are compared up to the last hash that both would have kept: the same sample of both.
    """
    limit = uint32(0xFFFFFFFF)
    if count_a == cap:
        limit = min(limit, load32_at(a + 4 * (count_a - 1)))
    if count_b == cap:
        limit = min(limit, load32_at(b + 4 * (count_b - 1)))
    i = 0
    j = 0
    both = 0
    either = 0
    while i < count_a or j < count_b:
        x = uint64(load32_at(a + 4 * i)) if i < count_a else uint64(1 << 32)
        y = uint64(load32_at(b + 4 * j)) if j < count_b else uint64(1 << 32)
        if min(x, y) > limit:
            break
        either += 1
        both += int(x == y)
        i += int(x <= y)
        j += int(y <= x)
    return both / either if either else 0.0


@njit(inline="always")
def _similarity(a, b, at, counts, cap):  # type: ignore[no-untyped-def]
    if cap == 0:
        return signature_similarity(at[a], at[b], int64(counts[a]))
    return set_similarity(at[a], int64(counts[a]), at[b], int64(counts[b]), cap)


@njit(nogil=True, cache=True)
def _fingerprint(address, count):  # type: ignore[no-untyped-def]
    h = uint64(count)
    for i in range(count):
        h = mix64(h ^ uint64(load32_at(address + 4 * i)))
    return h


@njit(nogil=True, cache=True)
def union_verified(keys, rows, parent, at, counts, cap, least):  # type: ignore[no-untyped-def]
    """Joins rows of equal keys whose similarity is at least `least` -> (joins, comparisons that failed, not made).

    at, counts: of `addresses`; cap 0: signatures, else shingle sets cut down to `cap`. In a run of up to PAIRS + 1
    rows every pair that is still apart is compared. In a longer run the rows are ordered by a hash of what is
    compared, and each is compared with the last PAIRS rows that found no partner: content decides, not position.
    """
    joined = 0
    failed = 0
    skipped = 0
    n = keys.shape[0]
    start = 0
    heads = np.empty(PAIRS, np.uint32)
    while start < n:
        end = start + 1
        while end < n and keys[end] == keys[start]:
            end += 1
        if end - start <= PAIRS + 1:
            for i in range(start + 1, end):
                for j in range(start, i):
                    if _find(parent, rows[i]) == _find(parent, rows[j]):
                        continue
                    if _similarity(rows[i], rows[j], at, counts, cap) >= least:
                        joined += int64(_union(parent, rows[i], rows[j]))
                    else:
                        failed += 1
        else:
            prints = np.empty(end - start, np.uint64)
            for i in range(start, end):
                prints[i - start] = _fingerprint(at[rows[i]], int64(counts[rows[i]]))
            order = np.argsort(prints, kind="mergesort")
            used = 0
            for i in range(end - start):
                row = rows[start + order[i]]
                found = False
                for k in range(max(0, used - PAIRS), used):
                    head = heads[k % PAIRS]
                    if _find(parent, row) == _find(parent, head):
                        found = True
                    elif _similarity(row, head, at, counts, cap) >= least:
                        joined += int64(_union(parent, row, head))
                        found = True
                    else:
                        failed += 1
                skipped += max(0, used - PAIRS)
                if not found:
                    heads[used % PAIRS] = row
                    used += 1
        start = end
    return joined, failed, skipped


@njit(nogil=True, cache=True)
def flatten(parent):  # type: ignore[no-untyped-def]
    """Points each row at its root, the smallest row of its set."""
    for row in range(parent.shape[0]):
        parent[row] = _find(parent, uint32(row))


@njit(nogil=True, cache=True)
def sizes_of(labels, out):  # type: ignore[no-untyped-def]
    """Counts each label. out (n,) uint32, zeros."""
    for i in range(labels.shape[0]):
        out[labels[i]] += uint32(1)


@njit(inline="always")
def _before(a, b, ranks, offsets, ties):  # type: ignore[no-untyped-def]
    """True where member a is to stay rather than b: smaller rank, then smaller bytes."""
    if ranks[a] != ranks[b]:
        return ranks[a] < ranks[b]
    size_a = offsets[a + 1] - offsets[a]
    size_b = offsets[b + 1] - offsets[b]
    for i in range(min(size_a, size_b)):
        x = load8(ties, offsets[a] + i)
        y = load8(ties, offsets[b] + i)
        if x != y:
            return x < y
    return size_a < size_b


@njit(nogil=True, cache=True)
def elect(members, labels, ranks, offsets, ties, best):  # type: ignore[no-untyped-def]
    """Finds the document of each cluster that stays.

    members (m,) uint32 rows; labels (n,) uint32, the cluster of each row; ranks (m,) float64, smaller is better, no
    NaN; offsets (m + 1,) int64 and ties (bytes,) uint8 decide between equal ranks. best (n,) uint32 is set at each
    label to the position in `members` of the document that stays; it must hold 0xFFFFFFFF before.
    """
    for m in range(members.shape[0]):
        label = labels[members[m]]
        b = best[label]
        if b == uint32(0xFFFFFFFF) or _before(int64(m), int64(b), ranks, offsets, ties):
            best[label] = uint32(m)


def warm() -> None:
    """Compiles each kernel, or reads it from the cache."""
    keys, rows, parent = np.zeros(2, np.uint64), np.arange(2, dtype=np.uint32), np.arange(2, dtype=np.uint32)
    alive, ranks, ties = np.ones(2, bool), np.zeros(2), np.frombuffer(bytes(2), np.uint8)
    limits = np.array([0, 2**64 - 1], np.uint64)
    for column in (keys, pa.array(keys).to_numpy()):  # Arrow's buffers are read-only, which is another type
        select(column, alive, keys, limits[0], limits[1], np.empty(2, np.uint64), np.empty(2, np.uint32), 0, 0)
    radix_sort(keys, rows, np.empty_like(keys), np.empty_like(rows))
    union_runs(keys, rows, parent.copy())
    signatures = pa.FixedSizeListArray.from_arrays(pa.array([1, 2, 1, 2], pa.uint32()), 2)
    at, counts = addresses(pa.chunked_array([signatures]))
    for cap in (0, 2):
        union_verified(keys, rows, parent, at, counts, cap, 0.5)
    flatten(parent)
    sizes_of(parent, np.zeros(2, np.uint32))
    elect(rows, parent, ranks, np.arange(3, dtype=np.int64), ties, np.full(2, 0xFFFFFFFF, np.uint32))
