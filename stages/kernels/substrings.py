"""Repeated substrings: which windows of bytes occur again, by a suffix array, and the text without them.

Documents lie one after the other in one array, each with the byte SEPARATOR behind it, which UTF-8 never has. A window
is `length` bytes of one document. The suffix array brings equal windows together; of each the first in the array of
texts stays.
"""

from __future__ import annotations

import numpy as np
from numba import int64, njit, uint8, uint32, uint64

from gristmill.stages.kernels.buffers import load8, load64

SEPARATOR = 0xFF
PADDING = 8  # bytes behind the last separator that a kernel may read

HIGH_BITS = 0x8080808080808080


@njit(nogil=True, cache=True)
def place(offsets, data, at, out):  # type: ignore[no-untyped-def]
    """Copies each document to out[at[i]:], a separator behind it. at (n,) int64; out (bytes,) uint8."""
    for i in range(len(offsets) - 1):
        q = at[i]
        for p in range(offsets[i], offsets[i + 1]):
            out[q] = load8(data, p)
            q += 1
        out[q] = SEPARATOR


@njit(inline="always")
def _separators(word):  # type: ignore[no-untyped-def]
    """The high bit of each byte that is 0xF8 or more, which no byte of UTF-8 is."""
    both = word & (word << uint64(1)) & (word << uint64(2))
    return both & (word << uint64(3)) & (word << uint64(4)) & uint64(HIGH_BITS)


@njit(inline="always")
def _same_window(text, a, b, length):  # type: ignore[no-untyped-def]
    """True when the windows at a and b hold the same bytes, all of one document each. a, b int64.

    It stops in the eight bytes where the texts part or a document ends, so it reads at most 7 bytes behind the last
    separator.
    """
    at = int64(0)
    while at + 8 <= length:
        word = load64(text, a + at)
        if word != load64(text, b + at) or _separators(word):
            return False
        at += 8
    if at == length:
        return True
    part = (uint64(1) << uint64(8 * (length - at))) - uint64(1)
    word = load64(text, a + at) & part
    return word == load64(text, b + at) & part and _separators(word) == 0


@njit(nogil=True, cache=True)
def mark_repeats(text, order, length, marks):  # type: ignore[no-untyped-def]
    """Marks the start of each window that occurs before as well -> how many windows those are.

    text uint8: the documents and PADDING; order (m,) int32: its suffix array without the padding; length int64;
    marks (m / 8 + 1,) uint8: a bit a byte of text. At most length / 8 + 1 steps an entry.
    """
    marked = int64(0)
    m = len(order)
    i = 0
    while i < m:
        first = int64(order[i])
        before = first
        i += 1
        while i < m:
            here = int64(order[i])
            if not _same_window(text, before, here, length):
                break
            later = max(first, here)
            first = min(first, here)
            marks[later >> 3] |= uint8(1) << uint8(later & 7)
            marked += 1
            before = here
            i += 1
    return marked


@njit(inline="always")
def _inward(text, start, end):  # type: ignore[no-untyped-def]
    """The characters that lie wholly in text[start:end], as a range; no end is behind a separator."""
    while start < end and text[start] & 0xC0 == 0x80:
        start += 1
    while start < end and text[end] & 0xC0 == 0x80:
        end -= 1
    return start, end


@njit(nogil=True, cache=True)
def spans(text, at, sizes, marks, length, counts, starts, ends):  # type: ignore[no-untyped-def]
    """The marked windows of each document, joined where they touch, without the characters cut at either end -> how
    many spans.

    at, sizes (n,) int64: where each document is, and its bytes; counts (n,) int64 is filled; starts, ends uint32:
    bytes from the start of the document, one document after the other, filled where there is room for them.
    """
    total = int64(0)
    for i in range(len(at)):
        begin = total
        start = int64(-1)
        until = int64(-1)
        last = at[i] + sizes[i]
        p = at[i]
        while p <= last:
            if p < last and p & 7 == 0 and marks[p >> 3] == 0 and p + 8 <= last:
                p += 8
                continue
            is_marked = p < last and (marks[p >> 3] >> uint8(p & 7)) & 1
            if start >= 0 and (p == last or (is_marked and p > until)):
                a, b = _inward(text, start, until)
                if a < b:
                    if total < len(starts):
                        starts[total], ends[total] = uint32(a - at[i]), uint32(b - at[i])
                    total += 1
                start = int64(-1)
            if is_marked:
                start = p if start < 0 else start
                until = p + length
            p += 1
        counts[i] = total - begin
    return total


@njit(nogil=True, cache=True)
def without(offsets, data, first, starts, ends, out, new_offsets, lost):  # type: ignore[no-untyped-def]
    """The text of each document without its spans.

    first (n + 1,) int64: the number of each document's first span; starts, ends (spans,) uint32: bytes from its start,
    ascending; out (bytes,) uint8 and new_offsets (n + 1,) int64 are filled; lost (n,) int64: characters of the spans.
    """
    q = 0
    new_offsets[0] = 0
    for i in range(len(offsets) - 1):
        lost[i] = 0
        p = offsets[i]
        for k in range(first[i], first[i + 1] + 1):
            is_span = k < first[i + 1]
            start = offsets[i] + int64(starts[k]) if is_span else offsets[i + 1]
            while p < start:
                out[q] = load8(data, p)
                p += 1
                q += 1
            if is_span:
                end = offsets[i] + int64(ends[k])
                while p < end:
                    lost[i] += int64(load8(data, p) & 0xC0 != 0x80)
                    p += 1
        new_offsets[i + 1] = q


def warm() -> None:
    """Compiles each kernel, or reads it from the cache."""
    offsets, data = np.array([0, 2], np.int64), np.frombuffer(b"aa", np.uint8)
    at, sizes = np.zeros(1, np.int64), np.full(1, 2, np.int64)
    text, marks = np.zeros(3 + PADDING, np.uint8), np.zeros(1, np.uint8)
    place(offsets, data, at, text)
    mark_repeats(text, np.array([1, 0, 2], np.int32), 1, marks)
    counts, places = np.empty(1, np.int64), np.empty(1, np.uint32)
    spans(text, at, sizes, marks, 1, counts, places, places.copy())
    first, found = np.array([0, 1], np.int64), np.ones(1, np.uint32)
    for spot in (found, _frozen(found)):
        without(offsets, data, first, spot, spot, np.empty(2, np.uint8), first.copy(), counts)


def _frozen(values: np.ndarray) -> np.ndarray:
    out = values.copy()
    out.flags.writeable = False  # Arrow's buffers are
    return out
