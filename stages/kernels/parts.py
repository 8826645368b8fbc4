"""Parts of documents, paragraphs or lines: where they are, which of them are copies, and the text without them.

A part is a run of bytes of a document; the parts of a document are the whole of it, in order. Its line break belongs
to the part before it, so that what is left of a document is a row of parts as they were.
"""

from __future__ import annotations

import numpy as np
from numba import int64, njit, uint32

from gristmill.stages.kernels.buffers import load8, mix64

NEWLINE = 10
NOT_COMPARED = 0  # the key of a part that is never a copy


@njit(nogil=True, cache=True)
def count_parts(offsets, data, breaks, counts):  # type: ignore[no-untyped-def]
    """How many parts each document has. breaks: a part ends after one "\\n", or after 2 and more; counts (n,) int64."""
    for i in range(len(offsets) - 1):
        counts[i] = _parts(offsets[i], offsets[i + 1], data, breaks, counts[:0], 0)


@njit(nogil=True, cache=True)
def part_starts(offsets, data, breaks, first, starts):  # type: ignore[no-untyped-def]
    """Where each part starts. first (n + 1,) int64: the number of the first part of each document; starts (m + 1,)
    int64 is filled, the last one with the end of the last document."""
    for i in range(len(offsets) - 1):
        _parts(offsets[i], offsets[i + 1], data, breaks, starts, first[i])
    starts[first[-1]] = offsets[-1]


@njit(nogil=True, cache=True)
def _parts(start, end, data, breaks, starts, at):  # type: ignore[no-untyped-def]
    """Parts of data[start:end] -> how many; their starts go to starts[at:], where it has room for any."""
    count = 0
    p = start
    while p < end:
        if len(starts):
            starts[at + count] = p
        count += 1
        newlines = 0
        while p < end:
            if load8(data, p) == NEWLINE:
                if newlines == 1 and breaks == 1:
                    break
                newlines += 1
            elif newlines >= breaks:
                break
            else:
                newlines = 0
            p += 1
    return count


@njit(nogil=True, cache=True)
def gather(starts, keys, alive, salts, priority, low, high, first_row, first_part, filled, out, owner, part):  # type: ignore[no-untyped-def]
    """Appends the keys of one chunk that lie in [low, high] -> how many `out`, `owner` and `part` hold now.

    starts (n + 1,) int64: positions in keys of each document's parts; alive (n,) bool; salts (all documents,) uint64
    or (0,); priority (all documents,) uint32: smaller stays. owner gets the priority of the part's document, part its
    number over all documents.
    """
    for i in range(len(starts) - 1):
        row = first_row + i
        if not alive[i]:
            continue
        for j in range(starts[i], starts[i + 1]):
            key = keys[j]
            if key == NOT_COMPARED:
                continue
            if salts.shape[0]:
                key = mix64(key ^ salts[row])
            if low <= key <= high:
                out[filled] = key
                owner[filled] = priority[row]
                part[filled] = first_part + (j - starts[0])
                filled += 1
    return filled


@njit(nogil=True, cache=True)
def mark_copies(keys, order, owner, part, keep_first, marks):  # type: ignore[no-untyped-def]
    """Marks, of each run of equal keys, all parts but the one of the document that stays before all others, or all of
    them -> how many. keys sorted, order (n,) uint32 the places of their entries in owner and part; marks: a bit a part.
    """
    marked = int64(0)
    n = len(keys)
    start = 0
    while start < n:
        end = start + 1
        while end < n and keys[end] == keys[start]:
            end += 1
        if end - start > 1:
            best = start
            for i in range(start + 1, end):
                a, b = order[i], order[best]
                if owner[a] < owner[b] or (owner[a] == owner[b] and part[a] < part[b]):
                    best = i
            for i in range(start, end):
                if i != best or not keep_first:
                    _set(marks, part[order[i]])
                    marked += 1
        start = end
    return marked


@njit(nogil=True, cache=True)
def mark_frequent(keys, order, owner, part, limits, marks, runs):  # type: ignore[no-untyped-def]
    """Marks the parts of each run of equal keys that more documents hold than the limit of the run's documents allows
    -> (parts marked, runs noted). limits (priorities,) uint32: by the owner. runs (m, 2) int64: for the first m runs,
    a part of it and its documents. owner must be one number a document.
    """
    marked = int64(0)
    noted = 0
    n = len(keys)
    start = 0
    while start < n:
        end = start + 1
        while end < n and keys[end] == keys[start]:
            end += 1
        if end - start > 1:
            owners = np.empty(end - start, np.uint32)
            for i in range(start, end):
                owners[i - start] = owner[order[i]]
            owners.sort()
            documents = 1
            for i in range(1, len(owners)):
                documents += int64(owners[i] != owners[i - 1])
            if documents > int64(limits[owners[0]]):
                first = part[order[start]]
                for i in range(start, end):
                    first = min(first, part[order[i]])
                    _set(marks, part[order[i]])
                    marked += 1
                if noted < len(runs):
                    runs[noted, 0], runs[noted, 1] = first, documents
                    noted += 1
        start = end
    return marked, noted


@njit(inline="always")
def _set(marks, bit):  # type: ignore[no-untyped-def]
    marks[bit >> 3] |= np.uint8(1) << np.uint8(bit & 7)


@njit(nogil=True, cache=True)
def marked_of(marks, starts, first_part, counts, places):  # type: ignore[no-untyped-def]
    """The marked parts of each document -> how many in all. starts (n + 1,) int64 positions of each document's parts in
    its chunk; counts (n,) int64; places: their numbers within the document, uint32, one document after the other."""
    total = 0
    for i in range(len(starts) - 1):
        counts[i] = 0
        for j in range(starts[i], starts[i + 1]):
            bit = first_part + (j - starts[0])
            if (marks[bit >> 3] >> np.uint8(bit & 7)) & 1:
                if total < len(places):
                    places[total] = uint32(j - starts[i])
                total += 1
                counts[i] += 1
    return total


@njit(nogil=True, cache=True)
def without(offsets, data, first, starts, gone, out, new_offsets, lost):  # type: ignore[no-untyped-def]
    """The text of each document without the parts that are gone.

    first, starts: of `part_starts`; gone (parts,) bool; out (bytes,) uint8 and new_offsets (n + 1,) int64 are filled;
    lost (n,) int64: characters taken away. Line breaks at the end of what is left go where the last part is gone.
    """
    q = 0
    new_offsets[0] = 0
    for i in range(len(offsets) - 1):
        begin = q
        lost[i] = 0
        for k in range(first[i], first[i + 1]):
            for p in range(starts[k], starts[k + 1] if k + 1 < first[i + 1] else offsets[i + 1]):
                byte = load8(data, p)
                if gone[k]:
                    lost[i] += int64(byte & 0xC0 != 0x80)
                else:
                    out[q] = byte
                    q += 1
        if first[i + 1] > first[i] and gone[first[i + 1] - 1]:
            while q > begin and out[q - 1] == NEWLINE:
                q -= 1
                lost[i] += 1
        new_offsets[i + 1] = q


def warm() -> None:
    """Compiles each kernel, or reads it from the cache."""
    offsets, data = np.array([0, 4], np.int64), np.frombuffer(b"a\nb\n", np.uint8)
    counts = np.empty(1, np.int64)
    count_parts(offsets, data, 1, counts)
    first, starts = np.array([0, 2], np.int64), np.empty(3, np.int64)
    part_starts(offsets, data, 1, first, starts)
    keys = np.array([5, 5], np.uint64)
    found, owner, part = np.empty(2, np.uint64), np.empty(2, np.uint32), np.empty(2, np.int64)
    ends = np.array([0, 2], np.int64)
    priority, salts, marks = np.zeros(1, np.uint32), np.zeros(0, np.uint64), np.zeros(1, np.uint8)
    frozen = keys.copy()
    frozen.flags.writeable = False  # Arrow's buffers are
    bounds = np.array([0, 2**64 - 1], np.uint64)
    gather(ends, frozen, np.ones(1, bool), salts, priority, bounds[0], bounds[1], 0, 0, 0, found, owner, part)
    order = np.arange(2, dtype=np.uint32)
    mark_copies(found, order, owner, part, True, marks)
    mark_frequent(found, order, owner, part, np.zeros(1, np.uint32), marks, np.empty((1, 2), np.int64))
    marked_of(marks, ends, 0, counts, np.empty(2, np.uint32))
    out, new_offsets, lost = np.empty(4, np.uint8), np.empty(2, np.int64), np.empty(1, np.int64)
    without(offsets, data, first, starts, np.zeros(2, bool), out, new_offsets, lost)
